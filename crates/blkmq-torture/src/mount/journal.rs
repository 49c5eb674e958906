//! The names of the files and where the files end, as a filesystem with a journal keeps them: changes become durable in
//! their order, a sync of a file does so with all up to the last one of that file, and a power cut keeps the first few of
//! the others.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use blkmq_testkit::Random;

/// The number of a file, which it keeps while it has a name.
pub(super) type FileNumber = u64;

/// The tree as it is, and as the medium has it.
#[derive(Debug, Default)]
pub(super) struct Journal {
    visible: Tree,
    durable: Tree,
    volatile: Vec<Step>,
}

/// What a change of the tree does.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A file has this name, beside others that it may have. Another file that had it loses it.
    Link(OsString, FileNumber),
    /// Nothing has this name any more.
    Unlink(OsString),
    /// A file that has the first name has the second one. Another file that had it loses it.
    Rename(OsString, OsString, FileNumber),
    /// The file ends here, in bytes.
    End(FileNumber, u64),
}

#[derive(Clone, Debug, Default)]
struct Tree {
    names: BTreeMap<OsString, FileNumber>,
    ends: BTreeMap<FileNumber, u64>,
}

impl Journal {
    /// The file of a name.
    pub(super) fn find(&self, name: &OsStr) -> Option<FileNumber> {
        self.visible.names.get(name).copied()
    }

    /// Where a file ends, in bytes.
    pub(super) fn end(&self, file: FileNumber) -> u64 {
        self.visible.ends.get(&file).copied().unwrap_or(0)
    }

    /// How many names a file has.
    pub(super) fn links(&self, file: FileNumber) -> u32 {
        self.visible
            .names
            .values()
            .filter(|number| **number == file)
            .count() as u32
    }

    /// Makes a change, which is volatile.
    pub(super) fn add(&mut self, step: Step) {
        self.visible.take(&step);
        self.volatile.push(step);
    }

    /// Makes all changes durable.
    pub(super) fn commit(&mut self) {
        self.keep(self.volatile.len());
    }

    /// Makes all changes durable up to the last one of a file.
    pub(super) fn commit_of(&mut self, file: FileNumber) {
        let last = self.volatile.iter().rposition(|step| step.file() == Some(file));
        self.keep(last.map_or(0, |last| last + 1));
    }

    fn keep(&mut self, steps: usize) {
        let durable = &mut self.durable;
        self.volatile.drain(..steps).for_each(|step| durable.take(&step));
    }

    /// Cuts the power: the first changes of those that are volatile are kept, as the seed has it.
    pub(super) fn forget(&mut self, seed: u64) {
        let kept = Random::new(seed).below(self.volatile.len() as u64 + 1) as usize;
        self.keep(kept);
        self.volatile.clear();
        self.visible = self.durable.clone();
    }
}

impl Step {
    fn file(&self) -> Option<FileNumber> {
        match self {
            Self::Link(_, file) | Self::Rename(_, _, file) | Self::End(file, _) => Some(*file),
            Self::Unlink(_) => None,
        }
    }
}

impl Tree {
    fn take(&mut self, step: &Step) {
        match step {
            Step::Link(name, file) => {
                self.names.insert(name.clone(), *file);
            }
            Step::Unlink(name) => {
                self.names.remove(name);
            }
            Step::Rename(from, to, file) => {
                // As POSIX has it: two names of one file stay.
                if self.names.get(to) != Some(file) {
                    self.names.remove(from);
                    self.names.insert(to.clone(), *file);
                }
            }
            Step::End(file, end) => {
                self.ends.insert(*file, *end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the name `a` leads to after a power cut, by many seeds.
    fn found(build: impl Fn() -> Journal) -> Vec<Option<FileNumber>> {
        let outcome = |seed| {
            let mut journal = build();
            journal.forget(seed);
            journal.find(OsStr::new("a"))
        };
        let mut all: Vec<_> = (0..200).map(outcome).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    #[test]
    fn names_are_forgotten_from_the_last_one_on_until_they_are_committed() {
        let build = |is_committed: bool| {
            let mut journal = Journal::default();
            journal.add(Step::Link("a".into(), 1));
            journal.commit();
            journal.add(Step::Link("b".into(), 2));
            journal.add(Step::Rename("b".into(), "a".into(), 2));
            match is_committed {
                true => journal.commit(),
                false => journal.commit_of(1),
            }
            journal
        };
        assert_eq!(found(|| build(true)), [Some(2)]);
        assert_eq!(found(|| build(false)), [Some(1), Some(2)]);
        let mut journal = build(false);
        journal.commit_of(2);
        assert_eq!(found(|| build(true)), [Some(2)]);
        journal.add(Step::End(2, 512));
        assert_eq!((journal.end(2), journal.links(2), journal.links(1)), (512, 1, 0));
        journal.add(Step::Unlink("a".into()));
        assert_eq!(journal.find(OsStr::new("a")), None);
    }
}
