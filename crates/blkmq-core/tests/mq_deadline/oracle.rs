//! A model of mq-deadline in the simplest way: each decision scans lists from end to end. It shares no
//! code with the elevator or `merge`. `Rules` lets a test give it a defect, to check that the defect is
//! detected.

use blkmq_core::bio::{Bio, Flags, Op};
use blkmq_core::limits::Limits;

/// The tunables (times in milliseconds), and a defect that an elevator could have.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) read_expire: u64,
    pub(crate) write_expire: u64,
    pub(crate) writes_starved: u64,
    pub(crate) fifo_batch: u64,
    pub(crate) front_merges: bool,
    pub(crate) prio_aging_expire: u64,
    pub(crate) wrong: Option<Wrong>,
}

/// A defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    RequeuedLastFirst,
    RequeuedAcrossClasses,
    GapsStayOpen,
    LaterDeadlineInherited,
    MergeAcrossDisks,
    MergeAcrossGroups,
    MergeAcrossLevels,
    MergeOfFlush,
    MergeBeyondBoundary,
    SweepFromZero,
    DiscardsAsReads,
    DeadlineOneLate,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            read_expire: 500,
            write_expire: 5000,
            writes_starved: 2,
            fifo_batch: 16,
            front_merges: true,
            prio_aging_expire: 10000,
            wrong: None,
        }
    }
}

/// A queued request.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    /// In the order of their offsets, all on one disk.
    pub(crate) bios: Vec<Bio>,
    start: u64,
    end: u64,
    at_ms: u64,
    number: u64,
}

#[derive(Default)]
struct Side {
    /// By position; with the same position, in the order of insertion.
    items: Vec<Item>,
    swept: u64,
}

#[derive(Default)]
struct Class {
    requeued: Vec<Item>,
    sides: [Side; 2],
    batch: Option<(usize, u64)>,
    reads_ahead: u64,
}

/// The model of a whole elevator.
pub(crate) struct Oracle {
    pub(crate) rules: Rules,
    limits: Limits,
    classes: [Class; 3],
    inserted: u64,
}

impl Oracle {
    pub(crate) fn new(rules: Rules, limits: Limits) -> Self {
        Self {
            rules,
            limits,
            classes: Default::default(),
            inserted: 0,
        }
    }

    pub(crate) fn queued(&self) -> usize {
        let sides = self.classes.iter().flat_map(|class| &class.sides);
        let requeued = self.classes.iter().map(|class| class.requeued.len());
        sides.map(|side| side.items.len()).sum::<usize>() + requeued.sum::<usize>()
    }

    /// Inserts a bio at a position; returns whether it was merged.
    pub(crate) fn insert(&mut self, bio: Bio, start: u64, now_ms: u64) -> bool {
        let (class, side) = (bio.prio.class as usize, self.side_of(&bio));
        let item = Item {
            start,
            end: start + bio.len,
            bios: vec![bio],
            at_ms: now_ms,
            number: self.inserted,
        };
        self.inserted += 1;
        let items = &self.classes[class].sides[side].items;
        let place = items.iter().filter(|other| other.start <= start).count();
        if place > 0 && self.may_join(&items[place - 1], &item) {
            self.append(class, side, place - 1, item, true);
            self.close_gap(class, side, place - 1);
            return true;
        }
        if self.rules.front_merges && items.get(place).is_some_and(|next| self.may_join(&item, next)) {
            let next = self.classes[class].sides[side].items.remove(place);
            self.classes[class].sides[side].items.insert(place, item);
            self.append(class, side, place, next, false);
            return true;
        }
        self.classes[class].sides[side].items.insert(place, item);
        false
    }

    pub(crate) fn requeue(&mut self, mut item: Item, now_ms: u64) {
        item.at_ms = now_ms;
        let mut class = item.bios[0].prio.class as usize;
        if self.rules.wrong == Some(Wrong::RequeuedAcrossClasses) {
            class = 0;
        }
        let requeued = &mut self.classes[class].requeued;
        match self.rules.wrong {
            Some(Wrong::RequeuedLastFirst) => requeued.insert(0, item),
            _ => requeued.push(item),
        }
    }

    pub(crate) fn dispatch(&mut self, now_ms: u64) -> Option<Item> {
        let first = self.classes.iter().position(|class| class.oldest().is_some())?;
        let age = self.rules.prio_aging_expire;
        let aged = |class: &Class| class.oldest().is_some_and(|at| at + age <= now_ms);
        let turn = (first + 1..3).find(|&c| aged(&self.classes[c])).unwrap_or(first);
        let rules = self.rules.clone();
        Some(self.classes[turn].dispatch(&rules, now_ms))
    }

    fn side_of(&self, bio: &Bio) -> usize {
        match bio.op {
            Op::Discard if self.rules.wrong == Some(Wrong::DiscardsAsReads) => 0,
            Op::Read => 0,
            _ => 1,
        }
    }

    /// Whether `right` may directly follow `left` in one request.
    fn may_join(&self, left: &Item, right: &Item) -> bool {
        let (a, b) = (&left.bios[0], &right.bios[0]);
        let wrong = |which| self.rules.wrong == Some(which);
        let same = a.op == b.op
            && (a.disk == b.disk || wrong(Wrong::MergeAcrossDisks))
            && (a.group == b.group || wrong(Wrong::MergeAcrossGroups))
            && a.prio.class == b.prio.class
            && (a.prio.level == b.prio.level || wrong(Wrong::MergeAcrossLevels))
            && a.flags == b.flags;
        let never = Flags::NO_MERGE.0
            | if wrong(Wrong::MergeOfFlush) {
                0
            } else {
                Flags::FUA.0 | Flags::PREFLUSH.0
            };
        left.end == right.start
            && same
            && a.op != Op::Flush
            && a.flags.0 & never == 0
            && self.within_limits(
                a.op,
                left.start,
                left.bios.len() + right.bios.len(),
                right.end - left.start,
            )
    }

    fn within_limits(&self, op: Op, start: u64, bios: usize, len: u64) -> bool {
        let limits = &self.limits;
        match op {
            Op::Discard => len <= limits.discard_max,
            Op::WriteZeroes => len <= limits.zeroes_max,
            _ => {
                let crosses = start / limits.boundary != (start + len - 1) / limits.boundary;
                len <= limits.transfer_max.into()
                    && bios <= limits.segments_max.into()
                    && (!crosses || self.rules.wrong == Some(Wrong::MergeBeyondBoundary))
            }
        }
    }

    /// Appends `right` to the item at `place`. The deadline is the earlier of both; if `right` is
    /// new, it is that of the item.
    fn append(&mut self, class: usize, side: usize, place: usize, right: Item, right_is_fresh: bool) {
        let left = &mut self.classes[class].sides[side].items[place];
        left.bios.extend(right.bios);
        left.end = right.end;
        let later = self.rules.wrong == Some(Wrong::LaterDeadlineInherited);
        if !right_is_fresh && (right.number < left.number) != later {
            (left.at_ms, left.number) = (right.at_ms, right.number);
        }
    }

    fn close_gap(&mut self, class: usize, side: usize, place: usize) {
        let items = &self.classes[class].sides[side].items;
        let closes = items
            .get(place + 1)
            .is_some_and(|next| self.may_join(&items[place], next));
        if closes && self.rules.wrong != Some(Wrong::GapsStayOpen) {
            let next = self.classes[class].sides[side].items.remove(place + 1);
            self.append(class, side, place, next, false);
        }
    }
}

impl Class {
    fn oldest(&self) -> Option<u64> {
        let sides = self.sides.iter().flat_map(|side| &side.items);
        sides.chain(&self.requeued).map(|item| item.at_ms).min()
    }

    fn dispatch(&mut self, rules: &Rules, now_ms: u64) -> Item {
        if !self.requeued.is_empty() {
            return self.requeued.remove(0);
        }
        let on = self.batch.filter(|&(_, count)| count < rules.fifo_batch);
        let on = on.and_then(|(side, count)| Some((side, count, self.sides[side].ahead(rules)?)));
        let (side, count, place) = on.unwrap_or_else(|| {
            let side = self.choose(rules);
            (side, 0, self.sides[side].begin(rules, side, now_ms))
        });
        self.batch = Some((side, count + 1));
        let item = self.sides[side].items.remove(place);
        self.sides[side].swept = item.start;
        item
    }

    fn choose(&mut self, rules: &Rules) -> usize {
        let [reads, writes] = &self.sides;
        match (reads.items.is_empty(), writes.items.is_empty()) {
            (false, true) => 0,
            (false, false) if self.reads_ahead < rules.writes_starved => {
                self.reads_ahead += 1;
                0
            }
            _ => {
                self.reads_ahead = 0;
                1
            }
        }
    }
}

impl Side {
    fn ahead(&self, rules: &Rules) -> Option<usize> {
        let from = match rules.wrong {
            Some(Wrong::SweepFromZero) => 0,
            _ => self.swept,
        };
        self.items.iter().position(|item| item.start >= from)
    }

    fn begin(&self, rules: &Rules, side: usize, now_ms: u64) -> usize {
        let oldest = self.items.iter().map(|item| item.number).min();
        let oldest = self.items.iter().position(|item| Some(item.number) == oldest);
        let oldest = oldest.expect("a side that was chosen has requests");
        let late = u64::from(rules.wrong == Some(Wrong::DeadlineOneLate));
        let deadline = self.items[oldest].at_ms + [rules.read_expire, rules.write_expire][side] + late;
        match self.ahead(rules) {
            Some(place) if now_ms < deadline => place,
            _ => oldest,
        }
    }
}
