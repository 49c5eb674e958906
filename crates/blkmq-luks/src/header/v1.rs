//! The header of LUKS1: 592 bytes, eight key slots behind each other, one cipher for slots and data. It has
//! no second copy and no checksum.

use super::{Header, Payload, ReadAt, check_cipher, check_key_bytes, check_stripes, text};
use crate::error::LuksError;
use crate::kdf::{Hash, Kdf};
use crate::slot::{KeyDigest, Slot, Slots};

/// Reads the header, if there is one.
pub(super) fn read(from: &mut dyn ReadAt) -> Result<Option<Header>, LuksError> {
    let mut bytes = [0; HEADER_BYTES];
    match from.read_at(0, &mut bytes) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(LuksError::Read(error)),
    }
    if bytes[..6] != MAGIC {
        return Ok(None);
    }
    match u16::from_be_bytes([bytes[6], bytes[7]]) {
        1 => decode(&bytes).map(Some),
        2 => Err(LuksError::damaged("both copies, or their checksums")),
        version => Err(LuksError::Unsupported {
            what: format!("LUKS{version}"),
            allowed: "supported are LUKS1 and LUKS2",
        }),
    }
}

fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, LuksError> {
    let number = |at: usize| -> u64 {
        let word = bytes[at..at + 4].try_into().expect("four bytes");
        u32::from_be_bytes(word).into()
    };
    let cipher = format!("{}-{}", text(&bytes[8..40])?, text(&bytes[40..72])?);
    let hash = Hash::named(&text(&bytes[72..104])?)?;
    check_cipher(&cipher)?;
    let key_bytes = check_key_bytes(number(108))?;
    let (digest, salt) = (bytes[112..132].to_vec(), bytes[132..164].to_vec());
    let digest = KeyDigest::new(hash, number(164), salt, digest)?;
    let uuid = text(&bytes[168..208])?;
    let slot = |at: usize| -> Result<Slot, LuksError> {
        if number(at) != ACTIVE {
            let state = number(at);
            return Err(LuksError::damaged(format!("a key slot has the state {state:#x}")));
        }
        let salt = bytes[at + 8..at + 40].to_vec();
        Ok(Slot {
            kdf: Kdf::pbkdf2(hash, number(at + 4), salt)?,
            key_bytes,
            area_key_bytes: key_bytes,
            offset: number(at + 40) * SECTOR,
            stripes: check_stripes(number(at + 44))?,
            hash,
        })
    };
    let mut slots = Slots::default();
    for index in 0..SLOTS {
        let at = SLOTS_AT + index * SLOT_BYTES;
        if number(at) != INACTIVE {
            slots.add(index, slot(at));
        }
    }
    Ok(Header {
        version: 1,
        uuid,
        payload: Payload {
            offset: number(104) * SECTOR,
            size: None,
            sector: SECTOR as u32,
            first_sector: 0,
        },
        warning: None,
        slots,
        digest,
    })
}

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const HEADER_BYTES: usize = 592;
const SLOTS_AT: usize = 208;
const SLOT_BYTES: usize = 48;
const SLOTS: usize = 8;
const ACTIVE: u64 = 0x00ac_71f3;
const INACTIVE: u64 = 0x0000_dead;
/// The unit of offsets, and the size of sectors.
const SECTOR: u64 = 512;
