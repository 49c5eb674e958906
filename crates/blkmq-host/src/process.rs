//! Whether another process has ended: its files, sockets and locks may outlast it for a moment, since the kernel closes
//! what a ring of io_uring has later. The locks of files, the paths of sockets and ublk devices ask.

/// Returns whether a process is gone or ending: a zombie, exiting, or killed and not yet ended. None if /proc does not
/// show it, which may be because it is gone, or of another user.
pub fn has_ended(pid: u32) -> Option<bool> {
    let read = |what: &str| std::fs::read_to_string(format!("/proc/{pid}/{what}")).ok();
    Some(is_ending(&read("stat")?, &read("status")?))
}

fn is_ending(stat: &str, status: &str) -> bool {
    // The state follows the name, which may itself have parentheses; the flags are six words further.
    let words: Vec<&str> = stat
        .rsplit_once(") ")
        .map_or_else(Vec::new, |(_, rest)| rest.split(' ').collect());
    let is_dead = matches!(words.first(), Some(&("Z" | "X")));
    let flags: u64 = words.get(6).and_then(|word| word.parse().ok()).unwrap_or(0);
    let pending = status
        .lines()
        .filter(|line| line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"));
    let is_killed = pending
        .filter_map(|line| line.split_whitespace().nth(1))
        .any(|mask| u64::from_str_radix(mask, 16).is_ok_and(|mask| mask & KILL != 0));
    is_dead || flags & EXITING != 0 || is_killed
}

/// The flag of an exiting process (PF_EXITING), and SIGKILL among its pending signals.
const EXITING: u64 = 4;
const KILL: u64 = 1 << 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_lives_has_not_ended_and_one_that_is_gone_is_not_shown() {
        assert_eq!(has_ended(std::process::id()), Some(false));
        assert_eq!(has_ended(u32::MAX), None);
    }

    #[test]
    fn process_has_ended_as_soon_as_it_is_killed() {
        let stat = |state, flags| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 0");
        let status = |pending| format!("Name:\ta\nSigPnd:\t0000000000000000\nShdPnd:\t{pending}\n");
        let none = status("0000000000000000");
        assert!(!is_ending(&stat("S", 4_194_304), &none));
        assert!(is_ending(&stat("Z", 0), &none));
        assert!(is_ending(&stat("R", 4_194_308), &none));
        assert!(is_ending(&stat("S", 0), &status("0000000000000100")));
        assert!(!is_ending(&stat("S", 0), &status("0000000000004000")));
    }
}
