//! The pattern of a block, which shows its place and when it was written, so that any mix-up or loss is
//! detected.

/// A sector, the unit of a check: it contains its place and its generation.
pub(crate) const SECTOR: usize = 512;
pub(crate) const BLOCK: usize = 4096;

/// The content of block `number` in its `generation`; generation 0 is a block that was never
/// written, with zeroes.
pub(crate) fn block(number: u64, generation: u64) -> Vec<u8> {
    (0..BLOCK / SECTOR)
        .flat_map(|index| sector(number, index as u64, generation))
        .collect()
}

/// The generation of a sector that was read from block `number`.
///
/// # Errors
/// If it is a sector of another place, or of none.
pub(crate) fn generation(number: u64, index: u64, found: &[u8]) -> Result<u64, String> {
    let word = |at: usize| u64::from_le_bytes(found[at..at + 8].try_into().expect("eight bytes"));
    let generation = if word(0) == MARK { word(24) } else { 0 };
    if sector(number, index, generation) == found {
        return Ok(generation);
    }
    Err(match word(0) {
        MARK => format!(
            "block {number} sector {index} holds block {} sector {} generation {}, or parts of it",
            word(8),
            word(16),
            word(24)
        ),
        other => format!("block {number} sector {index} holds no sector of ours: it begins with {other:#x}"),
    })
}

fn sector(number: u64, index: u64, generation: u64) -> Vec<u8> {
    if generation == 0 {
        return vec![0; SECTOR];
    }
    let mut words = vec![MARK, number, index, generation];
    let mut state = number ^ (index << 48) ^ (generation << 20) ^ MARK;
    while words.len() < SECTOR / 8 {
        state = state
            .wrapping_mul(0x5851_f42d_4c95_7f2d)
            .wrapping_add(0x1405_7b7e_f767_814f);
        words.push(state);
    }
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

const MARK: u64 = 0x6b63_6f6c_6220_7571;

#[test]
fn sector_that_is_elsewhere_or_torn_is_noticed() {
    let block = block(7, 3);
    assert_eq!(generation(7, 1, &block[SECTOR..2 * SECTOR]), Ok(3));
    assert_eq!(generation(7, 1, &[0; SECTOR]), Ok(0));
    assert!(generation(7, 0, &block[SECTOR..2 * SECTOR]).is_err());
    assert!(generation(8, 1, &block[SECTOR..2 * SECTOR]).is_err());
    let mut torn = block[..SECTOR].to_vec();
    torn[SECTOR - 1] ^= 1;
    assert!(generation(7, 0, &torn).is_err());
}
