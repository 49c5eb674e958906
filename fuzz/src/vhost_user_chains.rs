//! Bytes as the memory of a guest: every chain of its ring is pieces of that memory, in bounded number, or breaks a rule.

use std::sync::Arc;

use blkmq_core::bio::Lent;
use blkmq_export::vhost_user::chain::Chain;
use blkmq_export::vhost_user::codec::{RegionSpec, RingAddresses};
use blkmq_export::vhost_user::memory::{GuestMemory, Loans};
use blkmq_export::vhost_user::virtqueue::{Layout, Virtqueue};

/// Runs one input: the guest's memory from its beginning on. There are two regions, which meet; the record of what is in flight is
/// as hostile.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let memory = GuestMemory::default().with_anonymous(region(0)).expect("memory");
    let memory = memory.with_anonymous(region(REGION)).expect("memory");
    let first = memory.guest_window(0, REGION as usize).expect("it is there");
    first.write(0, &data[..data.len().min(REGION as usize)]);
    let at = RingAddresses {
        desc: USER,
        avail: USER + 0x100,
        used: USER + 0x180,
    };
    let first = data.first().copied().unwrap_or(0);
    let layout = Layout {
        is_packed: first & 2 != 0,
        has_event_index: first & 1 == 0,
        size: SIZE,
    };
    let record = memory.window(USER + 0x240, layout.record_bytes() as usize, 8);
    let record = record.filter(|_| data.len() > 0x240);
    let base = if layout.is_packed { 0x8000_8000 } else { 0 };
    let Ok(mut ring) = Virtqueue::new(&memory, layout, &at, base, record).expect("it lies in memory") else {
        return;
    };
    let mut loans = Loans::new(Arc::new(memory));
    let mut chain = Chain::default();
    for _ in 0..4 * SIZE {
        let Ok(Some(head)) = ring.next_head() else { break };
        assert!(head < SIZE, "head {head}");
        loans.begin();
        if ring.follow(&mut chain, &loans, head).is_ok() {
            assert!(
                chain.readable.len() + chain.writable.len() <= 2560,
                "too many pieces"
            );
            chain
                .readable
                .iter()
                .chain(&chain.writable)
                .for_each(|piece| check(&loans, *piece));
        }
        loans.end();
        ring.give_back(head, 1);
        ring.publish();
    }
    ring.ask_for_kicks();
}

/// A piece lies in one of the regions.
fn check(loans: &Loans, piece: Lent) {
    let mut is_inside = false;
    for guest in [0, REGION] {
        loans.lend(guest, REGION as u32, |whole| {
            let (start, from) = (whole.start().addr().get(), piece.start().addr().get());
            is_inside |= from >= start && from + piece.len() as usize <= start + whole.len() as usize;
        });
    }
    assert!(is_inside && !piece.is_empty(), "{piece:?}");
}

fn region(guest: u64) -> RegionSpec {
    RegionSpec {
        guest,
        bytes: REGION,
        user: USER + guest,
        offset: 0,
    }
}

const USER: u64 = 0x7000_0000;
const REGION: u64 = 4096;
const SIZE: u16 = 16;
