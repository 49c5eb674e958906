//! Decides who meets whom on one drive: scenes of tenants with weights and loads, and what each tenant is due.
//! `stage` plays a scene under an elevator, `score` compares what came with what was due.

use std::time::Duration;

use blkmq_core::bio::Op;
use blkmq_core::group::{GroupTree, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::time::Nanos;

/// A case of the bench.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    /// Names it in the report.
    pub(super) case: String,
    pub(super) tree: GroupTree,
    /// Those who want more than they can get.
    pub(super) crowd: Vec<Tenant>,
    /// The light one among them, whose latency counts.
    pub(super) victim: Option<Tenant>,
    /// What changes half-way.
    pub(super) turn: Turn,
    /// So long, four times a second, the second tenant's thread is away, as if another program had its processor.
    pub(super) away: Duration,
}

/// One tenant's load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    pub(super) group: GroupId,
    pub(super) op: Op,
    pub(super) block_bytes: u32,
    pub(super) depth: u32,
}

/// What happens in the middle of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    /// The first tenant's group gets this weight.
    Weight(u16),
    /// The last tenant of the crowd falls silent.
    Silence,
}

impl Scene {
    fn new(case: impl Into<String>) -> Self {
        Self {
            case: case.into(),
            tree: GroupTree::new(GROUPS_MAX),
            crowd: Vec::new(),
            victim: None,
            turn: Turn::Nothing,
            away: Duration::ZERO,
        }
    }

    /// Adds a group and a tenant of it, who wants more than its due.
    fn tenant(mut self, parent: GroupId, weight: u16, op: Op, block_bytes: u32, depth: u32) -> Self {
        let group = self.group(parent, weight);
        self.crowd.push(Tenant {
            group,
            op,
            block_bytes,
            depth,
        });
        self
    }

    fn group(&mut self, parent: GroupId, weight: u16) -> GroupId {
        self.tree
            .create(parent, weight)
            .expect("scenes are small and their weights in range")
    }

    /// The victim without the others.
    pub(super) fn victim_alone(&self) -> Self {
        Self {
            crowd: Vec::new(),
            ..self.clone()
        }
    }

    /// The same with a latency target for the victim's group.
    pub(super) fn with_target(&self, target: Nanos) -> Self {
        let mut scene = self.clone();
        if let Some(victim) = scene.victim {
            let set = scene.tree.set_latency_target(victim.group, Some(target));
            set.expect("tenants have groups");
        }
        scene
    }

    /// The share of the drive that each of `present` is due by the weights in `tree`, the victim taking nothing to speak of.
    pub(super) fn due(&self, tree: &GroupTree, present: &[Tenant]) -> Vec<f64> {
        let is_there = |id: GroupId| {
            present
                .iter()
                .any(|tenant| tree.chain(tenant.group).any(|(above, _)| above == id))
        };
        let share_of = |id: GroupId| {
            let node = tree.get(id).expect("tenants have groups");
            let siblings = tree.iter().filter(|(other, sibling)| {
                *other != ROOT && sibling.parent == node.parent && is_there(*other)
            });
            f64::from(node.weight)
                / siblings
                    .map(|(_, sibling)| f64::from(sibling.weight))
                    .sum::<f64>()
        };
        let due_of = |tenant: &Tenant| {
            tree.chain(tenant.group)
                .filter(|(id, _)| *id != ROOT)
                .map(|(id, _)| share_of(id))
                .product()
        };
        present.iter().map(due_of).collect()
    }
}

/// All scenes.
pub(super) fn all() -> Vec<Scene> {
    let mut scenes = vec![
        weights("weights=1:2:4/reads=4k", [Op::Read; 3], [4096; 3]),
        weights(
            "weights=1:2:4/writes=256k,4k,64k",
            [Op::Write; 3],
            [256 << 10, 4096, 64 << 10],
        ),
        weights(
            "weights=1:2:4/mixed=r4k,w256k,r64k",
            [Op::Read, Op::Write, Op::Read],
            [4096, 256 << 10, 64 << 10],
        ),
        nested(),
        Scene {
            away: AWAY,
            ..weights(
                "weights=1:2:4/writes=256k,4k,64k/away=4x3ms",
                [Op::Write; 3],
                [256 << 10, 4096, 64 << 10],
            )
        },
    ];
    scenes.extend([16, 64].map(many));
    for (flooders, block_bytes) in [(8, 4096), (63, 4096), (8, 256 << 10), (63, 256 << 10)] {
        scenes.push(isolation(flooders, block_bytes));
    }
    scenes.push(Scene::new("alone/reads=4k").tenant(ROOT, 100, Op::Read, 4096, CROWD_DEPTH));
    let equals = |case| {
        Scene::new(case)
            .tenant(ROOT, 100, Op::Read, 4096, CROWD_DEPTH)
            .tenant(ROOT, 100, Op::Read, 4096, CROWD_DEPTH)
    };
    scenes.push(Scene {
        turn: Turn::Weight(300),
        ..equals("reaction/weight=100to300")
    });
    scenes.push(Scene {
        turn: Turn::Silence,
        ..equals("reaction/silence")
    });
    scenes
}

/// Scenes that the kernel's schedulers can be given as well: flat groups, one operation.
pub(super) fn beside_kernel() -> Vec<Scene> {
    let pair = |case, weights: [u16; 2], depth, block_bytes: [u32; 2]| {
        let sized = weights.into_iter().zip(block_bytes);
        sized.fold(Scene::new(case), |scene, (weight, block_bytes)| {
            scene.tenant(ROOT, weight, Op::Read, block_bytes, depth)
        })
    };
    vec![
        pair("loop/weights=100:200/depth=16", [100, 200], 16, [4096; 2]),
        pair("loop/weights=100:400/depth=16", [100, 400], 16, [4096; 2]),
        pair("loop/weights=100:1000/depth=16", [100, 1000], 16, [4096; 2]),
        pair("loop/weights=100:200/depth=64", [100, 200], 64, [4096; 2]),
        pair(
            "loop/weights=100:200/reads=4k,64k/depth=16",
            [100, 200],
            16,
            [4096, 64 << 10],
        ),
        on_loop(isolation(8, 4096)),
        on_loop(isolation(8, 256 << 10)),
    ]
}

fn on_loop(scene: Scene) -> Scene {
    Scene {
        case: format!("loop/{}", scene.case),
        ..scene
    }
}

fn weights(case: &str, ops: [Op; 3], block_bytes: [u32; 3]) -> Scene {
    let mut scene = Scene::new(case);
    for ((weight, op), block_bytes) in [100, 200, 400].into_iter().zip(ops).zip(block_bytes) {
        scene = scene.tenant(ROOT, weight, op, block_bytes, CROWD_DEPTH);
    }
    scene
}

/// Two customers of weights 1 and 2; the first has two machines of weights 1 and 3.
fn nested() -> Scene {
    let mut scene = Scene::new("nested=1(1:3):2/reads=4k");
    let customer = scene.group(ROOT, 100);
    scene
        .tenant(customer, 100, Op::Read, 4096, CROWD_DEPTH)
        .tenant(customer, 300, Op::Read, 4096, CROWD_DEPTH)
        .tenant(ROOT, 200, Op::Read, 4096, CROWD_DEPTH)
}

fn many(tenants: u32) -> Scene {
    let weights = [100, 200, 400].into_iter().cycle().take(tenants as usize);
    weights.fold(
        Scene::new(format!("groups={tenants}/weights=1:2:4…/reads=4k")),
        |scene, weight| scene.tenant(ROOT, weight, Op::Read, 4096, FLOOD_DEPTH),
    )
}

/// A reader of one 4 KiB block at a time beside many who flood the drive, all of the same weight.
fn isolation(flooders: u32, block_bytes: u32) -> Scene {
    let op = if block_bytes == 4096 { Op::Read } else { Op::Write };
    let what = if op == Op::Read { "r4k" } else { "w256k" };
    let mut scene = Scene::new(format!("victim=r4k/flooders={flooders}x{FLOOD_DEPTH}{what}"));
    for _ in 0..flooders {
        scene = scene.tenant(ROOT, 100, op, block_bytes, FLOOD_DEPTH);
    }
    let group = scene.group(ROOT, 100);
    scene.victim = Some(Tenant {
        group,
        op: Op::Read,
        block_bytes: 4096,
        depth: 1,
    });
    scene
}

/// Room for the groups of the largest scene.
const GROUPS_MAX: u32 = 80;
/// About what another program takes of a processor at once.
const AWAY: Duration = Duration::from_millis(3);
const CROWD_DEPTH: u32 = 64;
const FLOOD_DEPTH: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_follows_the_tree_and_adds_up() {
        let scene = nested();
        let due = scene.due(&scene.tree, &scene.crowd);
        for (due, expected) in due.iter().zip([1.0 / 12.0, 3.0 / 12.0, 8.0 / 12.0]) {
            assert!((due - expected).abs() < 1e-9, "{due} for {expected}");
        }
        for scene in all() {
            let sum: f64 = scene.due(&scene.tree, &scene.crowd).iter().sum();
            assert!((sum - 1.0).abs() < 1e-9, "{}: {sum}", scene.case);
        }
    }

    #[test]
    fn the_share_of_a_silent_group_is_due_to_the_others() {
        let scene = nested();
        let due = scene.due(&scene.tree, &scene.crowd[..2]);
        assert!(
            (due[0] - 0.25).abs() < 1e-9 && (due[1] - 0.75).abs() < 1e-9,
            "{due:?}"
        );
    }
}
