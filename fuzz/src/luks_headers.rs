//! Bytes against what a daemon reads of a disk below an encrypted one: the headers of LUKS1 and LUKS2. A
//! header that is accepted is within all bounds, and a key does not open it in more time than these allow.

use blkmq_luks::{Header, LuksError};

/// Runs one input: the disk from its first byte on. The checksums of LUKS2 copies are made right first, where
/// the first byte is odd, since hardly any input would get behind them.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((mend, disk)) = data.split_first() else {
        return;
    };
    let mut disk = disk.to_vec();
    if mend % 2 == 1 {
        mend_checksums(&mut disk);
    }
    match Header::read(&mut &disk[..]) {
        Ok(header) => {
            let payload = header.payload;
            assert!(matches!(header.version, 1 | 2));
            assert!(matches!(payload.sector, 512 | 1024 | 2048 | 4096), "{payload:?}");
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() < 1024, "{text}");
            assert!(text.chars().all(|c| !c.is_control()), "{text:?}");
            assert!(
                !matches!(error, LuksError::WrongKey | LuksError::Memory(_)),
                "{text}"
            );
        }
    }
}

/// Makes the checksums of copies of 16 KiB right.
fn mend_checksums(disk: &mut [u8]) {
    for copy in disk.chunks_exact_mut(COPY_BYTES).take(2) {
        copy[CHECKSUM..CHECKSUM + 64].fill(0);
        let digest = ring::digest::digest(&ring::digest::SHA256, copy);
        copy[CHECKSUM..CHECKSUM + 32].copy_from_slice(digest.as_ref());
    }
}

const COPY_BYTES: usize = 16 << 10;
const CHECKSUM: usize = 448;
