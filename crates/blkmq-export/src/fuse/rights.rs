//! What this process may do to mount and unmount: by itself, or by `fusermount3`. `mount` looks here before it calls the system: where a
//! filter of system calls kills instead of refusing, a call that is not allowed would end the daemon of all.

/// How this process mounts and unmounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By the system's call.
    Directly,
    /// By `fusermount3`, which gains what this process lacks.
    ByHelper,
}

impl Way {
    /// The way that this thread has.
    ///
    /// # Errors
    /// It has none, and what to do.
    pub(super) fn find() -> Result<Self, &'static str> {
        // Where it cannot be read, the call says what is missing.
        let status = std::fs::read_to_string("/proc/thread-self/status");
        status.map_or(Ok(Self::Directly), |status| Self::of(&status))
    }

    fn of(status: &str) -> Result<Self, &'static str> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map_or("", str::trim)
        };
        let effective = u64::from_str_radix(field("CapEff:"), 16);
        match field("NoNewPrivs:") {
            _ if effective.is_ok_and(|effective| effective & CAP_SYS_ADMIN != 0) => Ok(Self::Directly),
            "1" => Err(
                "this process may not mount: it lacks CAP_SYS_ADMIN, and NoNewPrivileges keeps fusermount3 from gaining it; \
                 start the daemon as root, or without NoNewPrivileges and what implies it",
            ),
            _ => Ok(Self::ByHelper),
        }
    }
}

const CAP_SYS_ADMIN: u64 = 1 << 21;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_decide_how_a_process_mounts() {
        let of = |effective: &str, no_new_privs: &str| {
            Way::of(&format!(
                "Name:\tblkmq\nCapEff:\t{effective}\nNoNewPrivs:\t{no_new_privs}\n"
            ))
        };
        assert_eq!(of("000001ffffffffff", "1"), Ok(Way::Directly));
        assert_eq!(of("0000000000200000", "0"), Ok(Way::Directly));
        assert_eq!(of("0000000000000000", "0"), Ok(Way::ByHelper));
        assert!(of("0000000000000000", "1").is_err());
        assert!(of("000001ffffdfffff", "1").is_err());
    }
}
