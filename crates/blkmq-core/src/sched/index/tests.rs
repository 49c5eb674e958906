//! The index against an ordered map, and its check against a broken index.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// What the index must be equal to: entries by key and order of insertion.
#[derive(Default)]
struct Model {
    entries: BTreeMap<(u64, u64), SlotId>,
    inserted: u64,
}

struct Pair {
    chunks: Chunks,
    index: Index,
    model: Model,
}

#[derive(Clone, Debug)]
enum Step {
    Insert(u64),
    RemoveFrom(u64),
    RemoveNth(usize),
    LowerAfter(u64),
}

impl Pair {
    fn new(entries_max: usize) -> Self {
        let mut chunks = Chunks::new(entries_max, 1);
        let index = Index::new(&mut chunks);
        Self {
            chunks,
            index,
            model: Model::default(),
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Insert(key) => self.insert(key),
            Step::RemoveFrom(key) => self.remove_from(key),
            Step::RemoveNth(n) => self.remove_nth(n),
            Step::LowerAfter(key) => self.lower_after(key),
        }
    }

    fn insert(&mut self, key: u64) {
        let slot = SlotId(self.model.inserted as u32);
        let cursor = self.index.cursor_for(&self.chunks, key);
        let before = self.index.before(&self.chunks, cursor);
        let before = before.map(|at| self.index.entry(&self.chunks, at));
        let after = self.index.entry_at(&self.chunks, cursor);
        let after = after.map(|at| self.index.entry(&self.chunks, at));
        let id = (key, self.model.inserted);
        let entry = |((key, _), slot): (&(u64, u64), &SlotId)| (*key, *slot);
        assert_eq!(before, self.model.entries.range(..id).next_back().map(entry));
        assert_eq!(after, self.model.entries.range(id..).next().map(entry));
        self.index.insert(&mut self.chunks, cursor, key, slot);
        self.model.entries.insert(id, slot);
        self.model.inserted += 1;
    }

    fn remove_from(&mut self, key: u64) {
        let cursor = self.index.first_from(&self.chunks, key);
        let wanted = self.model.entries.range((key, 0)..).next();
        let wanted = wanted.map(|(&id, &slot)| (id, slot));
        assert_eq!(
            cursor.map(|at| self.index.entry(&self.chunks, at)),
            wanted.map(|((key, _), slot)| (key, slot))
        );
        let (Some(cursor), Some((id, slot))) = (cursor, wanted) else {
            return;
        };
        assert_eq!(self.index.remove(&mut self.chunks, cursor), slot);
        self.model.entries.remove(&id);
    }

    fn remove_nth(&mut self, n: usize) {
        if self.model.entries.is_empty() {
            return;
        }
        let n = n % self.model.entries.len();
        let (&id, &slot) = self.model.entries.iter().nth(n).unwrap();
        let cursor = self.index.find(&self.chunks, id.0, slot);
        assert_eq!(self.index.remove(&mut self.chunks, cursor), slot);
        self.model.entries.remove(&id);
    }

    /// Lowers the key of the first entry above `key` to `key`: what a front merge does.
    fn lower_after(&mut self, key: u64) {
        let cursor = self.index.cursor_for(&self.chunks, key);
        let Some(at) = self.index.entry_at(&self.chunks, cursor) else {
            return;
        };
        self.index.lower_key(&mut self.chunks, at, key);
        let (&id, &slot) = self.model.entries.range((key, u64::MAX)..).next().unwrap();
        self.model.entries.remove(&id);
        self.model.entries.insert((key, self.model.inserted), slot);
        self.model.inserted += 1;
    }

    fn compare(&self) {
        self.chunks.check(self.index.check(&self.chunks));
        let model = self.model.entries.iter().map(|((key, _), slot)| (*key, *slot));
        assert!(
            self.index.iter(&self.chunks).eq(model),
            "the index differs from the model"
        );
    }
}

fn steps(keys: u64) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..keys).prop_map(Step::Insert),
        2 => (0..keys).prop_map(Step::RemoveFrom),
        2 => any::<usize>().prop_map(Step::RemoveNth),
        1 => (0..keys).prop_map(Step::LowerAfter),
    ];
    prop::collection::vec(step, 0..800)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn index_equals_an_ordered_map(steps in steps(1 << 40)) {
        let mut pair = Pair::new(800);
        for step in &steps {
            pair.take(step);
        }
        pair.compare();
    }

    #[test]
    fn index_with_repeated_positions_equals_an_ordered_map(steps in steps(12)) {
        let mut pair = Pair::new(800);
        for (n, step) in steps.iter().enumerate() {
            pair.take(step);
            if n % 16 == 0 {
                pair.compare();
            }
        }
        pair.compare();
    }
}

#[test]
fn pool_suffices_for_the_thinnest_chunks() {
    const ENTRIES: u64 = 4096;
    let mut pair = Pair::new(ENTRIES as usize);
    for round in 0..4 {
        while pair.model.entries.len() < ENTRIES as usize {
            let n = pair.model.inserted;
            pair.insert(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (20 * (round % 2)));
        }
        pair.compare();
        for n in 0..ENTRIES as usize * 9 / 10 {
            pair.remove_nth(n * 7);
        }
        pair.compare();
    }
}

#[test]
#[should_panic(expected = "stands behind")]
fn check_sees_an_entry_out_of_order() {
    let mut pair = Pair::new(8);
    (1..5).for_each(|key| pair.insert(key));
    pair.chunks.all[pair.index.directory[0].chunk as usize].keys[2] = 0;
    pair.index.check(&pair.chunks);
}
