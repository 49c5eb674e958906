//! What the drivers of a history share: the time, the drive, the oracle and the history, on one thread.
//! `world` moves the time; `drive::modelled_hctx` is how the core meets the drive.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use blkmq_core::ids::GroupId;
use blkmq_core::time::Instant;

use crate::drive::Drive;
use crate::history::{Fact, History};
use crate::oracle::Oracle;
use crate::paths::Paths;

/// The state that all parts of one history share. It survives a power cut; the queue and its
/// reactors do not.
#[derive(Debug)]
pub struct Stage {
    /// The time.
    pub now: Cell<Instant>,
    /// The drives, each with a queue of its own.
    pub drives: Vec<RefCell<Drive>>,
    /// The oracle.
    pub oracle: RefCell<Oracle>,
    /// The history.
    pub history: RefCell<History>,
    /// The highest token given to a bio.
    pub tokens: Cell<u64>,
    /// The drivers' work, for its cost.
    pub work: Cell<Work>,
    /// Groups that bios may be submitted to: those that exist, and removed ones that are not
    /// retired.
    pub groups: RefCell<Vec<GroupId>>,
    /// The paths to the drive, if there are several.
    pub paths: Option<Rc<Paths>>,
    /// Lets another reactor run in the middle of a driver's call.
    pub others: RefCell<Option<Weak<dyn Others>>>,
}

/// How often drivers were called since the world last took the counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    /// Requests issued.
    pub issued: u64,
    /// Ends reaped.
    pub reaped: u64,
}

/// The reactors that run on other CPUs.
pub trait Others: std::fmt::Debug {
    /// May let others take some steps now, although one reactor is in the middle of its own.
    fn run_meanwhile(&self);
}

impl Stage {
    /// Adds a fact at the present time.
    pub fn note(&self, fact: Fact) {
        self.history.borrow_mut().note(self.now.get(), fact);
    }

    /// Lets the drives handle their own events until now.
    pub fn advance_drives(&self) {
        let mut oracle = self.oracle.borrow_mut();
        for drive in &self.drives {
            drive.borrow_mut().advance(self.now.get(), &mut *oracle);
        }
    }

    /// Says whether the condition holds for any drive.
    pub fn any_drive(&self, is_so: impl Fn(&Drive) -> bool) -> bool {
        self.drives.iter().any(|drive| is_so(&drive.borrow()))
    }

    /// Returns what a block of a drive holds after a power cut.
    pub fn durable(&self, block: u32) -> u64 {
        let mut drives = self.drives.iter().map(RefCell::borrow_mut);
        let found = drives.find_map(|mut drive| {
            let images = drive.images();
            images.blocks().contains(&block).then(|| images.durable(block))
        });
        found.expect("each block lies on a drive")
    }

    /// Lets another reactor run in between, if one can.
    pub fn run_meanwhile(&self) {
        let others = self.others.borrow().as_ref().and_then(Weak::upgrade);
        if let Some(others) = others {
            others.run_meanwhile();
        }
    }

    /// Takes the counters of the drivers' work.
    pub fn take_work(&self) -> Work {
        self.work.take()
    }
}
