//! The sandbox's part for calls of the system: two lists by which seccomp allows them, one for all threads and one for
//! reactors, which open, make and connect nothing once they are set up. What is not on a list fails with EPERM,
//! and so do some arguments of what is.

use std::collections::BTreeMap;
use std::sync::Arc;

use libc::c_long;
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter, apply_filter_all_threads,
};

use super::reach::Reach;

/// What happens to a call that is not on a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// It fails with EPERM.
    Refused,
    /// It is made, and the kernel's log has it.
    Logged,
}

/// The filters of a daemon.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    process: Arc<Vec<BpfProgram>>,
    reactors: Arc<Vec<BpfProgram>>,
}

impl Calls {
    /// The filters for what a configuration needs.
    pub(super) fn of(reach: &Reach, denied: Denied) -> Self {
        let mut process = [COMMON, OPENING].concat();
        if reach.mounts {
            process.extend(MOUNTING);
        }
        if reach.has_library {
            process.extend(OF_LIBRARIES);
        }
        let mut of_process = vec![allow(&process, Vec::new(), denied), without_detours(denied)];
        if denied == Denied::Refused {
            of_process.push(without_clone3());
        }
        // Clients of fuse and ublk make a ring on their reactor, and ask the kernel there how memory is counted.
        let is_open = reach.mounts || reach.makes_devices;
        let more = match reach.reactors_connect {
            false => vec![(libc::SYS_connect, vec![disconnect()])],
            // What can be connected are the sockets that a reactor has or makes.
            true => vec![
                (libc::SYS_socket, vec![unix_socket()]),
                (libc::SYS_connect, Vec::new()),
            ],
        };
        let of_reactors = (!is_open).then(|| allow(COMMON, more, denied));
        Self {
            process: Arc::new(of_process),
            reactors: Arc::new(of_reactors.into_iter().collect()),
        }
    }

    /// Confines all threads that there are, and those that they will start.
    ///
    /// # Errors
    /// The kernel has no such filters, or refuses them.
    pub(super) fn enter_process(&self) -> Result<(), Error> {
        self.process
            .iter()
            .try_for_each(|filter| apply_filter_all_threads(filter))
    }

    /// Confines the calling thread, and those that it will start, further.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn enter_reactor(&self) -> Result<(), Error> {
        self.reactors.iter().try_for_each(|filter| apply_filter(filter))
    }
}

/// A filter that allows these calls, more under their rules, and no others.
fn allow(calls: &[c_long], more: Vec<(c_long, Vec<SeccompRule>)>, denied: Denied) -> BpfProgram {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = calls.iter().map(|call| (*call, Vec::new())).collect();
    rules.insert(libc::SYS_clone, vec![without_namespaces()]);
    rules.extend(more);
    let mismatch = match denied {
        Denied::Refused => SeccompAction::Errno(libc::EPERM as u32),
        Denied::Logged => SeccompAction::Log,
    };
    compile(rules, mismatch, SeccompAction::Allow)
}

/// The flags of `clone3` are out of a filter's sight: threads are made by `clone`, as on a kernel without it.
fn without_clone3() -> BpfProgram {
    let rules = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    compile(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS as u32),
    )
}

/// Calls of the lists that, with some arguments, lead around what the sandbox forbids: sockets that landlock does not count
/// as TCP, connections that are opened as data is sent, input for the terminal of whoever started the daemon, and cores.
/// Not `MSG_FASTOPEN`: the kernel allows a call without looking further only if no filter looks at its arguments, and
/// every answer is sent by one.
fn without_detours(denied: Denied) -> BpfProgram {
    let fast_open = [
        (1, libc::IPPROTO_TCP as u64),
        (2, libc::TCP_FASTOPEN_CONNECT as u64),
    ];
    let rules = BTreeMap::from([
        (
            libc::SYS_socket,
            vec![
                when(&[(2, libc::IPPROTO_MPTCP as u64)]),
                when(&[(0, libc::AF_VSOCK as u64)]),
            ],
        ),
        (libc::SYS_setsockopt, vec![when(&fast_open)]),
        (
            libc::SYS_ioctl,
            vec![when(&[(1, TIOCSTI)]), when(&[(1, TIOCLINUX)])],
        ),
        (
            libc::SYS_prctl,
            vec![when(&[(0, libc::PR_SET_DUMPABLE as u64), (1, 1)])],
        ),
    ]);
    let matched = match denied {
        Denied::Refused => SeccompAction::Errno(libc::EPERM as u32),
        Denied::Logged => SeccompAction::Log,
    };
    compile(rules, SeccompAction::Allow, matched)
}

/// Puts a byte into a terminal's input; and the like of the console.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541c;

/// `clone` for threads and processes, but not into another namespace.
fn without_namespaces() -> SeccompRule {
    let namespaces = libc::CLONE_NEWNS
        | libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET;
    let none = SeccompCmpOp::MaskedEq(namespaces as u64);
    let condition = SeccompCondition::new(0, SeccompCmpArgLen::Qword, none, 0);
    let condition = condition.expect("there is such an argument");
    SeccompRule::new(vec![condition]).expect("a condition is there")
}

/// `connect` with an address that has only its family: the kernel knows no other such address than that which
/// dissolves a connection, with what was not sent.
fn disconnect() -> SeccompRule {
    when(&[(2, size_of::<libc::sa_family_t>() as u64)])
}

/// A unix socket, which a reactor makes to connect to a front end that listens.
fn unix_socket() -> SeccompRule {
    when(&[(0, libc::AF_UNIX as u64)])
}

/// A call whose arguments at these places have these values, in their lower 32 bits.
fn when(all: &[(u8, u64)]) -> SeccompRule {
    let conditions = all.iter().map(|(at, value)| {
        SeccompCondition::new(*at, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *value)
            .expect("there is such an argument")
    });
    SeccompRule::new(conditions.collect()).expect("a condition is there")
}

fn compile(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    mismatch: SeccompAction,
    matched: SeccompAction,
) -> BpfProgram {
    let arch = std::env::consts::ARCH
        .try_into()
        .expect("seccompiler knows the processors that blkmq is built for");
    let filter = SeccompFilter::new(rules, mismatch, matched, arch).expect("the two actions differ");
    filter
        .try_into()
        .expect("the lists are shorter than a filter may be")
}

/// What every thread may call: with descriptors that are open, with memory, threads and time; and to remove the sockets
/// of an address that closes, where landlock allows it.
const COMMON: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_signalfd4,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_fadvise64,
    libc::SYS_flock,
    libc::SYS_splice,
    libc::SYS_sendfile,
    libc::SYS_copy_file_range,
    libc::SYS_getdents64,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_msync,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_clone3,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_gettid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setattr,
    libc::SYS_sched_getattr,
    libc::SYS_getcpu,
    libc::SYS_setpriority,
    libc::SYS_getpriority,
    libc::SYS_ioprio_set,
    libc::SYS_ioprio_get,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_getrusage,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_kill,
    libc::SYS_tgkill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_capget,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_prlimit64,
    libc::SYS_getrandom,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    libc::SYS_accept4,
    libc::SYS_accept,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    libc::SYS_readlinkat,
    libc::SYS_unlinkat,
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getrlimit,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getpgrp,
];

/// What threads other than reactors may call as well: open and make files, sockets and rings.
const OPENING: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_mkdirat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_truncate,
    libc::SYS_utimensat,
    libc::SYS_statfs,
    libc::SYS_getcwd,
    libc::SYS_umask,
    libc::SYS_name_to_handle_at,
    libc::SYS_fgetxattr,
    libc::SYS_getxattr,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_socket,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_io_uring_setup,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_link,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
];

/// What mounting takes: the call, and a program that asks a server which may not answer.
const MOUNTING: &[c_long] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_execve,
    libc::SYS_chdir,
    libc::SYS_setpgid,
    libc::SYS_mknodat,
];

/// What Ceph's library calls beyond that, by its own memory allocator and its messengers.
const OF_LIBRARIES: &[c_long] = &[
    libc::SYS_mbind,
    libc::SYS_get_mempolicy,
    libc::SYS_set_mempolicy,
    libc::SYS_mlockall,
    libc::SYS_personality,
    libc::SYS_fsetxattr,
    libc::SYS_flistxattr,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    libc::SYS_timer_delete,
    // Where it is refused, the library ends the process.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
];

/// Newer than the table of the C library's crate on some processors.
const FCHMODAT2: c_long = 452;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_reactors_has_nothing_that_opens_or_starts_programs() {
        let forbidden = [
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_io_uring_setup,
            libc::SYS_ptrace,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_bpf,
            libc::SYS_keyctl,
            libc::SYS_process_vm_readv,
        ];
        assert!(forbidden.iter().all(|call| !COMMON.contains(call)));
        assert!(OPENING.iter().all(|call| !COMMON.contains(call)));
    }
}
