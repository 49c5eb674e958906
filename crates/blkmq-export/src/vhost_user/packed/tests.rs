//! Chains through a packed ring, round after round; what a kill leaves; hostile rings.

use std::sync::Arc;

use super::super::chain::length;
use super::super::codec::RegionSpec;
use super::super::packed_inflight::record_bytes;
use super::super::virtqueue::Virtqueue;
use super::*;

/// A driver with a ring of 4 at 0, what it says of calls at 0x100, the device at 0x200, and a record at 0x1000.
struct Driver {
    memory: Arc<GuestMemory>,
    window: Window,
    next: Place,
    used: Place,
}

const USER: u64 = 0x7000_0000;
const WRITE: u16 = 2;

impl Driver {
    fn new() -> Self {
        let spec = RegionSpec {
            guest: 0,
            bytes: 0x1_0000,
            user: USER,
            offset: 0,
        };
        let memory = GuestMemory::default().with_anonymous(spec).unwrap();
        let window = memory.guest_window(0, 0x1_0000).unwrap();
        let start = Place { index: 0, wrap: true };
        Self {
            memory: Arc::new(memory),
            window,
            next: start,
            used: start,
        }
    }

    /// A device that begins, or begins again with the record of the former one.
    fn device(&self) -> Result<PackedRing, Broken> {
        let at = RingAddresses {
            desc: USER,
            avail: USER + 0x100,
            used: USER + 0x200,
        };
        let record = self.memory.window(USER + 0x1000, record_bytes(4) as usize, 8);
        let base = 0x8000_8000;
        PackedRing::new(&self.memory, 4, &at, true, (base, record)).expect("it is in memory")
    }

    /// Offers a chain of so many descriptors, of 16 bytes to read and then of 1 byte to write each.
    fn offer(&mut self, id: u16, places: u16) {
        let first = self.next;
        for number in (0..places).rev() {
            let place = first.plus(number, 4);
            let at = 16 * usize::from(place.index);
            let (bytes, kind) = if number == 0 { (16_u32, 0) } else { (1, WRITE) };
            let more = if number + 1 < places { NEXT } else { 0 };
            let round = if place.wrap { AVAIL } else { USED };
            self.window.store(at, 0x4000_u64 + 64 * u64::from(id));
            self.window.store(at + 8, bytes);
            self.window.store(at + 12, id);
            self.window.store_index(at + FLAGS, kind | more | round);
        }
        self.next = first.plus(places, 4);
    }

    /// What the device has given back since the last time: an identifier, if it is that of a chain of so many places.
    fn take(&mut self, places: u16) -> Option<u16> {
        let at = 16 * usize::from(self.used.index);
        let flags = self.window.load_index(at + FLAGS);
        let is_used = (flags & AVAIL != 0) == self.used.wrap && (flags & USED != 0) == self.used.wrap;
        is_used.then(|| {
            self.used = self.used.plus(places, 4);
            self.window.load(at + 12)
        })
    }
}

#[test]
fn chains_go_round_and_round_in_any_order() {
    let mut driver = Driver::new();
    let mut device = driver.device().unwrap();
    let mut loans = Loans::new(Arc::clone(&driver.memory));
    loans.begin();
    let mut chain = Chain::default();
    for round in 0..50 {
        driver.offer(1, 2);
        driver.offer(3, 1);
        assert_eq!(device.next_head(), Ok(Some(1)), "round {round}");
        device.follow(&mut chain, &loans).unwrap();
        assert_eq!((length(&chain.readable), length(&chain.writable)), (16, 1));
        assert_eq!(device.next_head(), Ok(Some(3)));
        assert_eq!(device.next_head(), Ok(None));
        device.give_back(3, 0);
        device.give_back(1, 1);
        assert_eq!(driver.take(1), None, "nothing is shown yet");
        device.publish();
        assert_eq!(
            (driver.take(1), driver.take(2), driver.take(1)),
            (Some(3), Some(1), None)
        );
    }
    loans.end();
}

#[test]
fn chains_in_flight_at_a_kill_are_repeated_in_order_and_once() {
    for shows in [false, true] {
        let mut driver = Driver::new();
        let mut device = driver.device().unwrap();
        // Some rounds before, so that the entries of the record are mixed.
        for id in [0, 1, 2] {
            driver.offer(id, 2);
            assert_eq!(device.next_head(), Ok(Some(id)));
            device.give_back(id, 0);
            device.publish();
            assert_eq!(driver.take(2), Some(id));
        }
        driver.offer(0, 1);
        driver.offer(2, 2);
        driver.offer(3, 1);
        for id in [0, 2, 3] {
            assert_eq!(device.next_head(), Ok(Some(id)));
        }
        // Given back out of order: that overwrites the descriptor of the first one, which is in flight.
        device.give_back(2, 1);
        if shows {
            device.publish();
            assert_eq!(driver.take(2), Some(2));
        }
        let mut next = driver.device().unwrap();
        let mut loans = Loans::new(Arc::clone(&driver.memory));
        loans.begin();
        let expected: &[u16] = if shows { &[0, 3] } else { &[0, 2, 3] };
        for id in expected {
            assert_eq!(next.next_head(), Ok(Some(*id)), "shown: {shows}");
            let mut chain = Chain::default();
            next.follow(&mut chain, &loans).unwrap();
            let written = if *id == 2 { 1 } else { 0 };
            assert_eq!((length(&chain.readable), length(&chain.writable)), (16, written));
            assert_eq!(
                chain.readable[0].start(),
                driver.window_at(0x4000 + 64 * usize::from(*id))
            );
        }
        assert_eq!(next.next_head(), Ok(None));
        for id in expected {
            next.give_back(*id, 0);
        }
        next.publish();
        for id in expected {
            assert_eq!(driver.take(if *id == 2 { 2 } else { 1 }), Some(*id));
        }
        // All of its entries are free again.
        for id in [0, 1, 2, 3, 0, 1] {
            driver.offer(id, 4);
            assert_eq!(next.next_head(), Ok(Some(id)));
            next.give_back(id, 0);
            next.publish();
            assert_eq!(driver.take(4), Some(id));
        }
        loans.end();
    }
}

impl Driver {
    fn window_at(&self, at: usize) -> std::ptr::NonNull<u8> {
        let mut found = None;
        let mut loans = Loans::new(Arc::clone(&self.memory));
        loans.begin();
        loans.lend(at as u64, 1, |piece| found = Some(piece.start()));
        loans.end();
        found.unwrap()
    }
}

#[test]
fn driver_is_called_when_its_place_is_passed_in_this_round_or_the_next() {
    let mut driver = Driver::new();
    let mut device = driver.device().unwrap();
    let mut ends = |driver: &mut Driver, places: u16| {
        driver.offer(0, places);
        device.next_head().unwrap().unwrap();
        device.give_back(0, 0);
        let calls = device.publish();
        driver.take(places).unwrap();
        calls
    };
    let wish = |driver: &Driver, flags: u16, place: u16| {
        driver.window.store_index(0x100 + EVENT_PLACE, place);
        driver.window.store_index(0x100 + EVENT_FLAGS, flags);
    };
    assert!(ends(&mut driver, 1), "by default");
    wish(&driver, EVENT_OFF, 0);
    assert!(!ends(&mut driver, 1));
    wish(&driver, EVENT_AT, 3 | WRAP);
    assert!(!ends(&mut driver, 1), "2 of the first round");
    assert!(ends(&mut driver, 2), "3 of the first round, and 0 of the second");
    wish(&driver, EVENT_AT, 0);
    assert!(!ends(&mut driver, 3), "0 was passed before");
}

#[test]
fn repeated_chain_is_checked_like_an_available_one() {
    let mut driver = Driver::new();
    let mut device = driver.device().unwrap();
    driver.offer(1, 1);
    driver.offer(2, 1);
    device.next_head().unwrap();
    device.next_head().unwrap();
    let mut next = Virtqueue::Packed(driver.device().unwrap());
    for id in [1, 2] {
        assert!(next.has_available());
        assert_eq!(next.next_head(), Ok(Some(id)));
    }
    assert!(!next.has_available());
}

/// A kill after each store that a batch makes is tried by stopping before its last steps: shown, but the record not closed.
#[test]
fn batch_that_was_shown_is_closed_by_the_next_device() {
    let mut driver = Driver::new();
    let mut device = driver.device().unwrap();
    driver.offer(1, 2);
    driver.offer(2, 1);
    assert_eq!(
        (device.next_head(), device.next_head()),
        (Ok(Some(1)), Ok(Some(2)))
    );
    let record: Vec<u8> = (0..record_bytes(4) as usize)
        .map(|at| driver.window.load(0x1000 + at))
        .collect();
    device.give_back(1, 1);
    device.publish();
    // What `publish` does last is taken back: the marks, the old list and the old place.
    for at in [14, 15, 18, 19, 21, 32] {
        driver.window.store(0x1000 + at, record[at]);
    }
    let mut next = driver.device().unwrap();
    assert_eq!(next.next_head(), Ok(Some(2)), "what was shown is not done again");
    assert_eq!(next.next_head(), Ok(None));
}

#[test]
fn hostile_ring_breaks_the_device() {
    let broken = |spoil: fn(&mut Driver)| {
        let mut driver = Driver::new();
        let mut device = driver.device().unwrap();
        driver.offer(0, 1);
        assert_eq!(device.next_head(), Ok(Some(0)));
        spoil(&mut driver);
        device.next_head().expect_err("a rule is broken").0
    };
    // An identifier that is in flight, and one that is none.
    assert!(broken(|driver| driver.offer(0, 1)).contains("in flight"));
    assert!(broken(|driver| driver.offer(4, 1)).contains("beyond"));
    // More places than the ring has left, and a chain that goes on where nothing is.
    assert!(broken(|driver| driver.offer(1, 4)).contains("without an end"));
    assert!(
        broken(|driver| {
            driver.offer(1, 1);
            let at = 16 + FLAGS;
            driver.window.store_index(at, driver.window.load_index(at) | NEXT);
        })
        .contains("not available")
    );
}

#[test]
fn record_of_nonsense_breaks_the_device_or_names_what_is_there() {
    for byte in [0xff_u8, 3, 1] {
        let driver = Driver::new();
        driver.device().unwrap();
        for at in 12..record_bytes(4) as usize {
            driver.window.store(0x1000 + at, byte);
        }
        let Ok(mut device) = driver.device() else { continue };
        for _ in 0..8 {
            let Ok(Some(id)) = device.next_head() else { break };
            assert!(id < 4);
            device.give_back(id, 0);
            device.publish();
        }
    }
}
