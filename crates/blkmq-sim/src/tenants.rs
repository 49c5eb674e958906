//! Changes of groups while the queue is in use: they are made, weighted, capped, moved and removed at
//! random, and the core's answers are compared with a model of the tree. `control` calls it.

use blkmq_core::group::{Cap, CapKind, Caps, Change, GroupError, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::queue::Queue;
use blkmq_core::time::Nanos;

use crate::history::{Fact, GroupChange};
use crate::rng::Rng;
use crate::stage::Stage;

/// The groups that should exist.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// Existing groups with their parents.
    living: Vec<(GroupId, GroupId)>,
    /// Removed groups that were not yet seen to be retired, in order.
    leaving: Vec<GroupId>,
}

impl Tenants {
    /// Changes one group, or tries to.
    pub(crate) fn change(&mut self, queue: &Queue, stage: &Stage, rng: &mut Rng) {
        if self.living.is_empty() {
            let all = stage.groups.borrow();
            self.living = all.iter().map(|&id| (id, ROOT)).collect();
        }
        // One time in ten, a group that may not exist.
        let (group, parent) = if rng.below(10) == 0 {
            (GroupId(rng.below(12) as u32), GroupId(rng.below(12) as u32))
        } else {
            (rng.pick(&self.living).0, rng.pick(&self.living).0)
        };
        let change = rng.pick(&[
            GroupChange::Create,
            GroupChange::Weigh,
            GroupChange::Cap,
            GroupChange::Cap,
            GroupChange::Target,
            GroupChange::Move,
            GroupChange::Remove,
        ]);
        let may = self.may(change, group, parent);
        let result = match change {
            GroupChange::Create => queue.create_group(parent, 100).map(|made| {
                made.map(|id| {
                    self.arrived(id, parent, stage);
                })
            }),
            GroupChange::Weigh => queue.set_group_weight(group, 1 + rng.below(1000) as u16),
            GroupChange::Cap => queue.set_group_caps(group, caps(rng), stage.now.get()),
            GroupChange::Target => queue.set_group_latency_target(group, target(rng)),
            GroupChange::Move => queue.move_group(group, parent),
            GroupChange::Remove => queue.remove_group(group),
        };
        self.check_change(result, change, (group, parent), may, stage);
        self.see_who_is_gone(queue, stage);
    }

    /// Says whether a change should be possible, by this model.
    fn may(&self, change: GroupChange, group: GroupId, parent: GroupId) -> bool {
        let is_living = self.parent_of(group).is_some();
        match change {
            GroupChange::Create => self.parent_of(parent).is_some(),
            GroupChange::Cap | GroupChange::Target => is_living,
            GroupChange::Weigh => is_living && group != ROOT,
            GroupChange::Move => {
                let mut above = Some(parent);
                while let Some(id) = above.filter(|id| *id != group && *id != ROOT) {
                    above = self.parent_of(id);
                }
                is_living && group != ROOT && above == Some(ROOT)
            }
            GroupChange::Remove => {
                let is_parent = self.living.iter().any(|&(id, of)| of == group && id != ROOT);
                is_living && group != ROOT && !is_parent
            }
        }
    }

    fn check_change(
        &mut self,
        result: Change<()>,
        change: GroupChange,
        (group, parent): (GroupId, GroupId),
        may: bool,
        stage: &Stage,
    ) {
        let Ok(result) = result else {
            // The gate was held, so nothing has changed.
            return;
        };
        let done = result.is_ok();
        stage.note(Fact::Group { change, group, done });
        let is_full = matches!(result, Err(GroupError::Full { .. }));
        if done != may && !is_full {
            let text =
                format!("{change:?} of group {group} (parent {parent}): {result:?}, but possible: {may}");
            stage.oracle.borrow_mut().fail(text);
        }
        if done && change == GroupChange::Move {
            self.living.retain(|entry| entry.0 != group);
            self.living.push((group, parent));
        } else if done && change == GroupChange::Remove {
            self.living.retain(|entry| entry.0 != group);
            self.leaving.push(group);
        }
    }

    fn arrived(&mut self, id: GroupId, parent: GroupId, stage: &Stage) {
        // Only removed groups make room, and the core reuses their places in the order of their
        // removal.
        if self.parent_of(id).is_some() {
            let text = format!("group {id} was made, but it lives");
            stage.oracle.borrow_mut().fail(text);
        }
        self.leaving.retain(|leaving| *leaving != id);
        self.living.push((id, parent));
    }

    /// From now on, no bio is submitted to retired groups: their numbers may be reused.
    fn see_who_is_gone(&mut self, queue: &Queue, stage: &Stage) {
        let Ok(left) = queue.retire_groups() else {
            return;
        };
        let gone = self.leaving.len().saturating_sub(left);
        self.leaving.drain(..gone);
        let mut groups = stage.groups.borrow_mut();
        groups.clear();
        groups.extend(self.living.iter().map(|entry| entry.0));
        groups.extend(&self.leaving);
    }

    fn parent_of(&self, group: GroupId) -> Option<GroupId> {
        let entry = self.living.iter().find(|(id, _)| *id == group);
        entry.map(|(_, parent)| *parent)
    }
}

/// No target, one that is missed often, or one that is met.
fn target(rng: &mut Rng) -> Option<Nanos> {
    rng.pick(&[
        None,
        Some(Nanos::from_micros(1)),
        Some(Nanos::from_micros(150)),
        Some(Nanos::from_millis(50)),
    ])
}

/// No caps, or some. They are wide enough that many bios end in a second.
fn caps(rng: &mut Rng) -> Caps {
    let mut caps = Caps::default();
    for kind in CapKind::ALL {
        if rng.below(4) == 0 {
            let rate = if kind.is_bytes() {
                rng.from_to(8 << 20, 256 << 20)
            } else {
                rng.from_to(1000, 50_000)
            };
            let burst = rng.pick(&[0, 0, rate / 1000, rate / 10]);
            caps.set(kind, Some(Cap { rate, burst }));
        }
    }
    caps
}
