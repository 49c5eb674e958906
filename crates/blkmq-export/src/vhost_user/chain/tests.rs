//! Chains that keep to the rules, and hostile ones.

use std::sync::Arc;

use super::super::codec::{RegionSpec, RingAddresses};
use super::super::memory::GuestMemory;
use super::*;

/// A guest of 64 KiB: the table at 0, the available ring at 0x1000, the used one at 0x2000; descriptors of 16 a table.
struct Guest {
    loans: Loans,
    ring: Ring,
    memory: Window,
}

fn guest() -> Guest {
    let spec = RegionSpec {
        guest: 0,
        bytes: 0x1_0000,
        user: 0x7000_0000,
        offset: 0,
    };
    let memory = GuestMemory::default().with_anonymous(spec).unwrap();
    let at = RingAddresses {
        desc: spec.user,
        avail: spec.user + 0x1000,
        used: spec.user + 0x2000,
    };
    let ring = Ring::new(&memory, 16, &at, true).unwrap();
    let window = memory.guest_window(0, 0x1_0000).unwrap();
    let mut loans = Loans::new(Arc::new(memory));
    loans.begin();
    Guest {
        loans,
        ring,
        memory: window,
    }
}

impl Guest {
    fn put(&self, at: usize, (guest, bytes, flags, next): (u64, u32, u16, u16)) {
        self.memory.store(at, guest);
        self.memory.store(at + 8, bytes);
        self.memory.store(at + 12, flags);
        self.memory.store(at + 14, next);
    }

    fn lengths(&self) -> Result<(u64, u64), Broken> {
        let mut chain = Chain::default();
        chain.follow(&self.ring, &self.loans, 0)?;
        Ok((length(&chain.readable), length(&chain.writable)))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Memory that is dropped while it is lent is leaked.
        self.loans.end();
    }
}

/// Address, bytes, flags and next of a descriptor.
type Fields = (u64, u32, u16, u16);

#[test]
fn chain_is_followed_through_the_table_and_through_one_of_its_own() {
    let guest = guest();
    guest.put(0, (0x4000, 16, NEXT, 3));
    guest.put(48, (0x5000, 4096, NEXT | WRITE, 1));
    guest.put(16, (0x6000, 1, WRITE, 0));
    assert_eq!(guest.lengths(), Ok((16, 4097)));
    guest.put(0x3000, (0x4000, 16, NEXT, 1));
    guest.put(0x3010, (0x6000, 1, WRITE, 0));
    guest.put(0, (0x3000, 32, INDIRECT, 0));
    assert_eq!(guest.lengths(), Ok((16, 1)));
}

#[test]
fn chain_that_breaks_a_rule_breaks_the_device() {
    let next = NEXT;
    let chains: [(&str, &[Fields]); 9] = [
        ("without an end", &[(0x4000, 16, next, 1), (0x4000, 16, next, 0)]),
        ("beyond the table", &[(0x4000, 16, next, 16)]),
        ("outside of memory", &[(0xfff0, 17, 0, 0)]),
        ("outside of memory", &[(u64::MAX, 2, WRITE, 0)]),
        ("of no bytes", &[(0x4000, 0, 0, 0)]),
        (
            "behind a writable",
            &[(0x4000, 1, next | WRITE, 1), (0x4000, 1, 0, 0)],
        ),
        ("goes on elsewhere", &[(0x3000, 32, INDIRECT | next, 1)]),
        ("not allowed", &[(0x3000, 33, INDIRECT, 0)]),
        ("outside of memory", &[(0xfff8, 16, INDIRECT, 0)]),
    ];
    for (reason, descriptors) in chains {
        let guest = guest();
        for (index, descriptor) in descriptors.iter().enumerate() {
            guest.put(16 * index, *descriptor);
        }
        let broken = guest.lengths().expect_err(reason);
        assert!(broken.0.contains(reason), "{broken} instead of {reason}");
    }
}

#[test]
fn table_in_a_table_and_one_that_loops_break_the_device() {
    let guest = guest();
    guest.put(0, (0x3000, 32, INDIRECT, 0));
    guest.put(0x3000, (0x3000, 32, INDIRECT, 0));
    assert!(
        guest
            .lengths()
            .is_err_and(|broken| broken.0.contains("in another"))
    );
    guest.put(0x3000, (0x4000, 1, NEXT, 0));
    assert!(
        guest
            .lengths()
            .is_err_and(|broken| broken.0.contains("without an end"))
    );
    guest.put(0x3000, (0x4000, 1, NEXT, 2));
    assert!(
        guest
            .lengths()
            .is_err_and(|broken| broken.0.contains("beyond its table"))
    );
}

#[test]
fn available_index_that_jumps_breaks_the_device() {
    let mut guest = guest();
    guest.ring.begin(0, None);
    guest.memory.store_index(0x1002, 1);
    guest.memory.store_index(0x1004, 15);
    assert_eq!(guest.ring.next_head(), Ok(Some(15)));
    guest.memory.store_index(0x1002, 18);
    assert!(guest.ring.next_head().is_err());
    guest.memory.store_index(0x1002, 2);
    guest.memory.store_index(0x1006, 16);
    assert!(
        guest
            .ring
            .next_head()
            .is_err_and(|broken| broken.0.contains("no descriptor"))
    );
}

#[test]
fn header_may_lie_in_pieces_and_a_status_at_the_end_of_one() {
    let guest = guest();
    for at in 0..16 {
        guest.memory.store(0x4000 + at, at as u8);
    }
    let mut pieces = Vec::new();
    for (at, bytes) in [(0x4000, 3), (0x4003, 1), (0x4004, 30)] {
        assert!(guest.loans.lend(at, bytes, |piece| pieces.push(piece)));
    }
    let mut header = [0; 16];
    assert!(take_front(&mut pieces, &mut header));
    assert_eq!(header, std::array::from_fn(|at| at as u8));
    assert_eq!(length(&pieces), 18);
    assert_eq!(take_last(&mut pieces).map(|last| last.len()), Some(1));
    assert_eq!(length(&pieces), 17);
    assert!(!take_front(&mut pieces, &mut [0; 18]));
}
