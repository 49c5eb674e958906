//! Many FIFO lines over one fixed table of places, made at set-up; it decides nothing. Bios of `sw_ctx` wait
//! in them, a line for each group, and requests of `throttle`.

/// Lines of things that wait; all lines together have room for a fixed number.
#[derive(Debug)]
pub(crate) struct Lines<T> {
    lines: Box<[WaitList]>,
    slots: Box<[Node<T>]>,
    /// The first of the unused slots, which are linked by `next`.
    unused: u32,
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct WaitList {
    first: u32,
    last: u32,
    len: u32,
}

#[derive(Debug)]
struct Node<T> {
    thing: Option<T>,
    next: u32,
}

impl<T> Lines<T> {
    /// Makes `lines` empty lines, with room for `room` things.
    pub(crate) fn new(lines: usize, room: usize) -> Self {
        let room = u32::try_from(room).expect("slots are numbered by 32 bits");
        let slot = |number: u32| Node {
            thing: None,
            next: if number + 1 < room { number + 1 } else { NONE },
        };
        Self {
            lines: vec![WaitList::EMPTY; lines].into(),
            slots: (0..room).map(slot).collect(),
            unused: if room == 0 { NONE } else { 0 },
            count: 0,
        }
    }

    /// How many lines there are.
    pub(crate) fn lines(&self) -> u32 {
        self.lines.len() as u32
    }

    /// How many things wait.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// How many things wait in a line.
    #[inline]
    pub(crate) fn len(&self, line: u32) -> u32 {
        self.lines[line as usize].len
    }

    /// Says whether nothing waits in a line.
    #[inline]
    pub(crate) fn is_empty(&self, line: u32) -> bool {
        self.len(line) == 0
    }

    /// Puts a thing at the end of a line.
    ///
    /// # Panics
    /// If there is no room.
    pub(crate) fn push(&mut self, line: u32, thing: T) {
        let number = self.fill_slot(thing, NONE);
        let line = &mut self.lines[line as usize];
        match std::mem::replace(&mut line.last, number) {
            NONE => line.first = number,
            last => self.slots[last as usize].next = number,
        }
        line.len += 1;
    }

    /// Puts a thing in front of a line.
    ///
    /// # Panics
    /// If there is no room.
    pub(crate) fn push_front(&mut self, line: u32, thing: T) {
        let number = self.fill_slot(thing, self.lines[line as usize].first);
        let line = &mut self.lines[line as usize];
        line.first = number;
        if line.last == NONE {
            line.last = number;
        }
        line.len += 1;
    }

    /// The first thing of a line.
    pub(crate) fn first(&self, line: u32) -> Option<&T> {
        let first = self.lines[line as usize].first;
        self.slots.get(first as usize)?.thing.as_ref()
    }

    /// The first thing of a line, to be changed.
    pub(crate) fn first_mut(&mut self, line: u32) -> Option<&mut T> {
        let first = self.lines[line as usize].first;
        self.slots.get_mut(first as usize)?.thing.as_mut()
    }

    /// Takes the first thing out of a line.
    pub(crate) fn pop(&mut self, line: u32) -> Option<T> {
        let line = &mut self.lines[line as usize];
        let number = line.first;
        let slot = self.slots.get_mut(number as usize)?;
        line.first = std::mem::replace(&mut slot.next, self.unused);
        if line.first == NONE {
            line.last = NONE;
        }
        line.len -= 1;
        self.unused = number;
        self.count -= 1;
        slot.thing.take()
    }

    /// Visits all things, in no particular order.
    pub(crate) fn for_each_mut(&mut self, visit: impl FnMut(&mut T)) {
        let used = self.slots.iter_mut().filter_map(|slot| slot.thing.as_mut());
        used.for_each(visit);
    }

    /// All things, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| slot.thing.as_ref())
    }

    /// Asserts that every thing is in one line, and that the lines' lengths are right.
    pub(crate) fn check_invariants(&self) {
        let mut count = 0;
        for (number, line) in self.lines.iter().enumerate() {
            let (mut at, mut len, mut last) = (line.first, 0, NONE);
            while let Some(slot) = self.slots.get(at as usize) {
                assert!(slot.thing.is_some(), "line {number}: slot {at} is empty");
                len += 1;
                assert!(
                    len <= line.len,
                    "line {number} of {}: longer, or a loop",
                    line.len
                );
                (last, at) = (at, slot.next);
            }
            assert_eq!(
                (len, last),
                (line.len, line.last),
                "line {number}: length and end"
            );
            count += len as usize;
        }
        assert_eq!(count, self.count, "things in lines");
    }

    fn fill_slot(&mut self, thing: T, next: u32) -> u32 {
        let number = self.unused;
        assert!(
            number != NONE,
            "more things wait than there is room for: {}",
            self.count
        );
        let slot = &mut self.slots[number as usize];
        self.unused = std::mem::replace(&mut slot.next, next);
        slot.thing = Some(thing);
        self.count += 1;
        number
    }
}

impl WaitList {
    const EMPTY: Self = Self {
        first: NONE,
        last: NONE,
        len: 0,
    };
}

/// No slot: the end of a line.
const NONE: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_share_their_room_and_keep_their_order() {
        let mut lines = Lines::new(2, 3);
        lines.push(0, 'b');
        lines.push(1, 'x');
        lines.push_front(0, 'a');
        lines.check_invariants();
        assert_eq!((lines.count(), lines.len(0), lines.len(1)), (3, 2, 1));
        assert_eq!(
            (lines.pop(0), lines.pop(1), lines.pop(1)),
            (Some('a'), Some('x'), None)
        );
        lines.push_front(1, 'y');
        lines.push(1, 'z');
        lines.check_invariants();
        assert_eq!(
            (lines.pop(1), lines.pop(0), lines.pop(1)),
            (Some('y'), Some('b'), Some('z'))
        );
        assert!(lines.is_empty(0) && lines.is_empty(1) && lines.first(0).is_none());
        lines.check_invariants();
    }

    #[test]
    #[should_panic(expected = "more things wait than there is room for: 1")]
    fn more_than_agreed_is_refused_loudly() {
        let mut lines = Lines::new(1, 1);
        lines.push(0, 'a');
        lines.push(0, 'b');
    }
}
