//! Bytes against what a daemon reads of a disk below an encrypted one: the headers of LUKS1 and LUKS2, and all that
//! opening the disk does with them. A header that is accepted is within all bounds. Key slots that cost little are tried
//! with a passphrase, which opens some of the corpus: the area of the slot, its merge, the digest, the cipher.

use blkmq_luks::{Header, LuksError, Secret, Xts};

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
            open(&header, &disk);
        }
        Err(error) => {
            let text = shown(&error);
            assert!(
                !matches!(
                    error,
                    LuksError::WrongKey | LuksError::Untried(_) | LuksError::Memory(_)
                ),
                "{text}"
            );
        }
    }
}

/// Opens a disk with [`PASSPHRASE`]. Says whether that is its key.
fn open(header: &Header, disk: &[u8]) -> bool {
    let passphrase = Secret::take(&mut PASSPHRASE.to_vec()).expect("locked memory");
    match header.unlock_within(COST_MAX, &passphrase, &mut &*disk) {
        Ok(key) => {
            header.check_key(&key).expect("the digest has accepted it");
            let payload = header.payload;
            let xts = Xts::new(key.bytes(), payload.sector).expect("the lengths of keys were checked");
            let plain = vec![7; 2 * payload.sector as usize];
            let mut sectors = plain.clone();
            xts.encrypt(payload.first_sector, &mut sectors);
            assert!(sectors != plain);
            xts.decrypt(payload.first_sector, &mut sectors);
            assert!(sectors == plain, "{payload:?}");
            true
        }
        Err(error) => {
            let text = shown(&error);
            let is_expected = matches!(error, LuksError::WrongKey | LuksError::Untried(_));
            assert!(is_expected, "{text}");
            false
        }
    }
}

/// An error's text, which must be one line for a log.
fn shown(error: &LuksError) -> String {
    let text = error.to_string();
    assert!(text.len() < TEXT_MAX, "{text}");
    assert!(text.chars().all(|c| !c.is_control()), "{text:?}");
    text
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
/// What opens the slots of the corpus.
const PASSPHRASE: &[u8] = b"key";
/// Slots that cost more are not tried: some milliseconds of PBKDF2, 2 MiB of Argon2.
const COST_MAX: u64 = 1 << 11;
/// A header has up to 32 slots, each with a line of its own.
const TEXT_MAX: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_with_cheap_slots_are_opened_by_the_passphrase() {
        for seed in ["luks1-opens", "luks2-opens", "luks2-argon2id-opens"] {
            let path = format!("{}/corpus/luks_headers/{seed}", env!("CARGO_MANIFEST_DIR"));
            let bytes = std::fs::read(&path).expect(seed);
            let mut disk = bytes[1..].to_vec();
            mend_checksums(&mut disk);
            let header = Header::read(&mut &disk[..]).expect(seed);
            assert!(open(&header, &disk), "{seed}");
            // Another passphrase's key does not pass.
            let area = disk.len() - 1;
            disk[area] ^= 1;
            assert!(!open(&header, &disk), "{seed}");
        }
    }
}
