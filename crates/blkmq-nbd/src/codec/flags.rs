//! The flag fields, and the meaning of each bit; the sibling modules have the messages that carry them.

macro_rules! flag_field {
    ($(#[$doc:meta])* $name:ident($raw:ty) { $($(#[$bit_doc:meta])* $bit:ident = $at:expr;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
        pub struct $name(pub $raw);

        impl $name {
            /// No bit set.
            pub const NONE: $name = $name(0);
            $($(#[$bit_doc])* pub const $bit: $name = $name(1 << $at);)*
            /// Every bit this implementation knows.
            pub const KNOWN: $name = $name($((1 << $at) |)* 0);

            /// Whether all bits of `other` are set.
            #[inline]
            pub const fn contains(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// Both fields' bits together.
            #[inline]
            pub const fn with(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }

            /// `other`'s bits if `condition` holds, besides these.
            #[inline]
            pub const fn with_if(self, condition: bool, other: $name) -> $name {
                if condition { self.with(other) } else { self }
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}({:#x}", stringify!($name), self.0)?;
                $(if self.contains($name::$bit) { write!(f, " {}", stringify!($bit))?; })*
                f.write_str(")")
            }
        }
    };
}

flag_field! {
    /// What the server announces in its greeting.
    HandshakeFlags(u16) {
        /// Options are answered one by one (fixed newstyle).
        FIXED_NEWSTYLE = 0;
        /// The padding after `NBD_OPT_EXPORT_NAME` can be left out.
        NO_ZEROES = 1;
    }
}

flag_field! {
    /// The client's answer to [`HandshakeFlags`].
    ClientFlags(u32) {
        /// The client understands option replies.
        FIXED_NEWSTYLE = 0;
        /// The client wants no padding after `NBD_OPT_EXPORT_NAME`.
        NO_ZEROES = 1;
    }
}

flag_field! {
    /// What an export can do; sent when it is selected.
    TransmissionFlags(u16) {
        /// Set always.
        HAS_FLAGS = 0;
        /// Nothing that changes data is accepted.
        READ_ONLY = 1;
        /// `FLUSH` is accepted.
        SEND_FLUSH = 2;
        /// The `FUA` command flag is accepted.
        SEND_FUA = 3;
        /// The medium rotates.
        ROTATIONAL = 4;
        /// `TRIM` is accepted.
        SEND_TRIM = 5;
        /// `WRITE_ZEROES` and its `NO_HOLE` flag are accepted.
        SEND_WRITE_ZEROES = 6;
        /// The `DF` flag of `READ` is accepted.
        SEND_DF = 7;
        /// A flush on one connection covers the writes completed on all of them.
        CAN_MULTI_CONN = 8;
        /// `CACHE` is accepted.
        SEND_CACHE = 10;
        /// The `FAST_ZERO` flag of `WRITE_ZEROES` is accepted.
        SEND_FAST_ZERO = 11;
        /// `BLOCK_STATUS` accepts a payload that filters contexts.
        BLOCK_STATUS_PAYLOAD = 12;
    }
}

flag_field! {
    /// What a client asks for with one command.
    CommandFlags(u16) {
        /// Reply only when the written data is durable.
        FUA = 0;
        /// Zeroes must be allocated, not a hole.
        NO_HOLE = 1;
        /// At most one content chunk in the reply to a read.
        DF = 2;
        /// At most one extent in the reply to a block status request.
        REQ_ONE = 3;
        /// Fail rather than write zeroes slowly.
        FAST_ZERO = 4;
        /// The header's length counts a payload that follows (extended headers only).
        PAYLOAD_LEN = 5;
    }
}

flag_field! {
    /// Flags of one reply chunk.
    ChunkFlags(u16) {
        /// The last chunk of the reply.
        DONE = 0;
    }
}

flag_field! {
    /// The state of an extent in `base:allocation`.
    ExtentState(u32) {
        /// Nothing is allocated there.
        HOLE = 0;
        /// It reads as zeroes.
        ZERO = 1;
    }
}
