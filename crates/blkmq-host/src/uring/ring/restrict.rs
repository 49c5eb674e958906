//! What a restricted ring may be used for. A filter of system calls does not see the operations of io_uring, so the
//! kernel keeps this list for the ring; `docs/operate/sandbox.md` has the rest of the sandbox.

use std::io;

use io_uring::register::Restriction;
use io_uring::{Submitter, opcode};

/// Restricts a ring that was made disabled, and enables it.
pub(super) fn restrict(submitter: &Submitter<'_>) -> io::Result<()> {
    let operations = OPERATIONS.iter().map(|code| Restriction::sqe_op(*code));
    let registrations = REGISTRATIONS.iter().map(|code| Restriction::register_op(*code));
    let flags = [Restriction::sqe_flags_allowed(SQE_FLAGS)];
    let mut all: Vec<Restriction> = operations.chain(registrations).chain(flags).collect();
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()
}

/// Operations on descriptors that are open, and on the ring itself: none opens, makes or reaches anything.
const OPERATIONS: &[u8] = &[
    opcode::Nop::CODE,
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
    opcode::Timeout::CODE,
    opcode::TimeoutRemove::CODE,
    opcode::AsyncCancel::CODE,
    opcode::UringCmd80::CODE,
];
/// `IORING_REGISTER_ENABLE_RINGS`, `IORING_REGISTER_FILES_UPDATE` and `IORING_REGISTER_IOWQ_MAX_WORKERS`.
const REGISTRATIONS: &[u8] = &[12, 6, 19];
/// All flags of an entry up to `IOSQE_CQE_SKIP_SUCCESS`.
const SQE_FLAGS: u8 = 0x7f;

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use blkmq_core::time::Nanos;
    use io_uring::types::Fd;

    use super::super::{RingConfig, RingHandle};
    use super::*;

    #[test]
    fn restricted_ring_reads_open_files_and_opens_no_other() {
        let ring = RingHandle::new(RingConfig {
            is_restricted: true,
            ..RingConfig::default()
        });
        let ring = ring.unwrap();
        let client = ring.open_client();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        ring.register_file(file.as_raw_fd()).unwrap();
        ring.limit_workers(64).unwrap();
        let mut bytes = [0u8; 4];
        let read = opcode::Read::new(Fd(file.as_raw_fd()), bytes.as_mut_ptr(), 4).build();
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/dev/null".as_ptr()).build();
        let mut completed = Vec::new();
        for (entry, expected) in [(read, 4), (open, -libc::EACCES)] {
            ring.push(client.id(), entry, 7);
            while completed.is_empty() {
                ring.wait(Some(Nanos::from_millis(100)));
                ring.reap();
                client.take(&mut completed);
            }
            assert_eq!(completed.pop().unwrap().result, expected);
        }
        assert_eq!(&bytes, b"\x7fELF");
    }
}
