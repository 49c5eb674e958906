//! Small typed numbers that name the engine's parts and index tables made at set-up. Every other module
//! uses them; a driver returns the [`Cookie`] on completion.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $raw);

        impl $name {
            /// Returns the number as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A reactor of a queue: one thread with one place to wait.
    ReactorId(u16)
}
id! {
    /// A hardware context of a queue.
    HctxId(u16)
}
id! {
    /// A disk of a queue.
    DiskId(u32)
}
id! {
    /// A group (tenant) known to the queue. Group 0 is the root.
    GroupId(u32)
}
id! {
    /// The bounded number of a request in flight at one hardware context.
    Tag(u32)
}

/// Names one issue of one request to a driver: the tag and how often that tag's slot has been used.
/// A completion with the cookie of an earlier use (for example, after a timeout) has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cookie(u64);

impl Cookie {
    /// Joins a tag and its slot's generation.
    pub const fn new(tag: Tag, generation: u32) -> Self {
        Self((generation as u64) << 32 | tag.0 as u64)
    }

    /// Names the next use of the same slot.
    #[inline]
    pub(crate) const fn next(self) -> Self {
        Self(self.0.wrapping_add(1 << 32))
    }

    /// Returns the tag.
    pub const fn tag(self) -> Tag {
        Tag(self.0 as u32)
    }

    /// Returns the generation of the tag's slot.
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Returns the cookie as a number, for a driver's own user data.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Makes a cookie from the number that [`Cookie::raw`] returned.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }
}

/// Largest number of reactors of a queue.
pub const REACTORS_MAX: usize = 128;

/// A set of reactors, for kicks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReactorSet(u128);

impl ReactorSet {
    /// Adds a reactor.
    pub fn insert(&mut self, reactor: ReactorId) {
        self.0 |= 1 << reactor.0;
    }

    /// Says whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Says whether `reactor` is in the set.
    pub const fn contains(self, reactor: ReactorId) -> bool {
        self.0 >> reactor.0 & 1 == 1
    }

    /// Removes a reactor, if it is there.
    #[inline]
    pub fn remove(&mut self, reactor: ReactorId) {
        self.0 &= !(1 << reactor.0);
    }

    /// The reactors that are in both sets.
    #[inline]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Removes and returns the lowest reactor.
    pub fn pop(&mut self) -> Option<ReactorId> {
        (self.0 != 0).then(|| {
            let lowest = self.0.trailing_zeros();
            self.0 &= self.0 - 1;
            ReactorId(lowest as u16)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookie_keeps_tag_and_generation() {
        let cookie = Cookie::new(Tag(77), 0xdead_beef);
        assert_eq!((cookie.tag(), cookie.generation()), (Tag(77), 0xdead_beef));
        assert_eq!(Cookie::from_raw(cookie.raw()), cookie);
    }

    #[test]
    fn reactor_set_gives_back_each_member_once() {
        let mut set = ReactorSet::default();
        for id in [127, 3, 3, 64] {
            set.insert(ReactorId(id));
        }
        assert!(set.contains(ReactorId(64)) && !set.contains(ReactorId(5)));
        let popped: Vec<u16> = std::iter::from_fn(|| set.pop()).map(|r| r.0).collect();
        assert_eq!(popped, [3, 64, 127]);
    }
}
