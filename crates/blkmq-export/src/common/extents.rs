//! The extents of a disk in whole blocks, whatever units its drive stores. `lookup` rounds what drives answer, so a client
//! can ask on from where an answer ends.

use blkmq_host::device::Extent;

/// Rounds extents from `offset` on, of a range that ends at `end`, to whole blocks: a block that is stored in part is data.
///
/// What a last block is about which nothing more is known is left out, or is data if that is all there is.
pub(super) fn in_blocks(extents: &[Extent], offset: u64, end: u64, block: u32) -> Vec<Extent> {
    let block = u64::from(block);
    let mut rounded = Vec::with_capacity(extents.len());
    // What is known of the block that is not complete: from where on, and what it has in common.
    let (mut at, mut open) = (offset, None);
    for extent in extents {
        let mut left = extent.len.min(end - at);
        while left > 0 {
            let is_inside = open.is_some() || at % block != 0;
            let len = match block - at % block {
                rest if is_inside || left < block => rest.min(left),
                _ if at + left == end => left,
                _ => left - left % block,
            };
            let part = Extent { len, ..*extent };
            let known = open.take().map_or(part, |open| common(open, part));
            (at, left) = (at + len, left - len);
            match at % block == 0 || at == end {
                true => push(&mut rounded, known),
                false => open = Some(known),
            }
        }
    }
    if let (Some(open), true) = (open, rounded.is_empty()) {
        let block_end = at.next_multiple_of(block).min(end);
        rounded.push(Extent::data(open.len + block_end - at));
    }
    rounded
}

/// Both as one extent.
fn common(one: Extent, other: Extent) -> Extent {
    Extent {
        len: one.len + other.len,
        hole: one.hole && other.hole,
        zero: one.zero && other.zero,
    }
}

fn push(extents: &mut Vec<Extent>, next: Extent) {
    match extents.last_mut() {
        Some(last) if (last.hole, last.zero) == (next.hole, next.zero) => last.len += next.len,
        _ => extents.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1024;

    fn holes_and_data(lens: &[u64]) -> Vec<Extent> {
        let extent = |(at, len): (usize, &u64)| match at % 2 {
            0 => Extent::hole(*len),
            _ => Extent::data(*len),
        };
        lens.iter()
            .enumerate()
            .filter(|(_, len)| **len > 0)
            .map(extent)
            .collect()
    }

    #[test]
    fn extents_smaller_than_a_block_make_it_data_and_holes_are_whole_blocks() {
        let found = holes_and_data(&[68 * K, 4 * K, 4 * K, 4 * K, 112 * K, 0, 64 * K, 64 * K]);
        let rounded = in_blocks(&found, 0, 320 * K, 65536);
        let expected = holes_and_data(&[64 * K, 64 * K, 128 * K, 64 * K]);
        assert_eq!(rounded, expected);
        assert_eq!(in_blocks(&expected, 0, 320 * K, 65536), expected);
        assert_eq!(in_blocks(&found, 0, 320 * K, 4096).len(), 6);
    }

    #[test]
    fn extents_of_a_range_that_begins_inside_a_block_end_with_a_block() {
        let found = holes_and_data(&[4 * K, 4 * K, 300 * K]);
        let rounded = in_blocks(&found, 4 * K, 256 * K, 65536);
        assert_eq!(rounded, holes_and_data(&[0, 60 * K, 192 * K]));
    }

    #[test]
    fn extents_that_end_before_the_range_leave_out_what_is_not_known() {
        let known = in_blocks(&[Extent::hole(68 * K)], 0, 1 << 20, 65536);
        assert_eq!(known, [Extent::hole(64 * K)]);
        let alone = in_blocks(&[Extent::hole(4 * K)], 0, 1 << 20, 65536);
        assert_eq!(alone, [Extent::data(64 * K)]);
        let at_the_end = in_blocks(&[Extent::hole(4 * K)], 0, 4 * K, 65536);
        assert_eq!(at_the_end, [Extent::hole(4 * K)]);
    }
}
