//! A scene: tenants with weights and loads on one drive, and what each tenant is due. `cases` lists them,
//! `spec` reads one from the command line; `stage`, `clients` and `kernel` play it, `score` compares the
//! results with the dues.

use std::fmt;
use std::time::Duration;

use blkmq_core::bio::Op;
use blkmq_core::group::{GroupTree, ROOT};
use blkmq_core::ids::GroupId;
use blkmq_core::time::Nanos;

/// A case of the bench.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    /// Its name in the report.
    pub(super) case: String,
    pub(super) tree: GroupTree,
    /// Tenants that want more than they can get.
    pub(super) crowd: Vec<Tenant>,
    /// The light tenant, whose latency counts.
    pub(super) victim: Option<Tenant>,
    /// What is to be reached beside light tenants, as clients see it.
    pub(super) goal: Goal,
    /// What changes half-way through.
    pub(super) turn: Turn,
    /// The drive, if none is given on the command line.
    pub(super) model: Model,
    /// How long the second tenant's thread pauses, four times a second, as if another program had
    /// its CPU.
    pub(super) away: Duration,
}

/// One tenant's load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tenant {
    pub(super) group: GroupId,
    pub(super) load: Load,
}

/// A tenant's load: a number of I/Os in flight at a time, of one kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) op: Op,
    pub(super) is_random: bool,
    pub(super) block_bytes: u32,
    pub(super) depth: u32,
    /// I/Os per second at most; 0 for as many as it can have.
    pub(super) rate: u32,
    /// Milliseconds between bursts of `depth` I/Os; 0 for none.
    pub(super) rest_ms: u32,
}

impl Load {
    /// Random reads.
    pub(super) const fn reads(block_bytes: u32, depth: u32) -> Self {
        Self::random(Op::Read, block_bytes, depth)
    }

    /// An operation at random places.
    pub(super) const fn random(op: Op, block_bytes: u32, depth: u32) -> Self {
        Self {
            op,
            is_random: true,
            block_bytes,
            depth,
            rate: 0,
            rest_ms: 0,
        }
    }

    /// The same with pauses: so many I/Os per second.
    pub(super) const fn at(self, rate: u32) -> Self {
        Self { rate, ..self }
    }

    /// The same in bursts: as many I/Os as may be under way, then a pause when all have ended.
    pub(super) const fn in_bursts(self, rest_ms: u32) -> Self {
        Self { rest_ms, ..self }
    }

    /// Bytes under way.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.depth)
    }

    /// Whether it asks for little: it pauses.
    pub(super) const fn is_light(&self) -> bool {
        self.rate > 0 || self.rest_ms > 0
    }

    /// The same as fast as it can, one at a time.
    pub(super) const fn one_at_a_time(self) -> Self {
        Self {
            depth: 1,
            rate: 0,
            rest_ms: 0,
            ..self
        }
    }

    /// As `spec` reads it, without the weight.
    pub(super) fn spec(&self) -> String {
        let mut text = format!("{}:{}:{}", self.depth, self.block_bytes, self.rw());
        if self.rate > 0 {
            text += &format!("@{}", self.rate);
        }
        if self.rest_ms > 0 {
            text += &format!("/{}", self.rest_ms);
        }
        text
    }

    /// The operation, in fio's words.
    pub(super) const fn rw(&self) -> &'static str {
        match (self.op.is_write(), self.is_random) {
            (false, true) => "randread",
            (false, false) => "read",
            (true, true) => "randwrite",
            (true, false) => "write",
        }
    }
}

/// `16x64k`, followed by the operation if it is not random reads, by `@` and the rate if it has one, and by `/` and the
/// milliseconds between bursts.
impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}k", self.depth, self.block_bytes >> 10)?;
        match self.rw() {
            "randread" => {}
            rw => write!(f, ":{rw}")?,
        }
        if self.rate > 0 {
            write!(f, "@{}", self.rate)?;
        }
        match self.rest_ms {
            0 => Ok(()),
            rest => write!(f, "/{rest}ms"),
        }
    }
}

/// What light tenants and those that they are beside are to have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Goal {
    /// Median and 99th percentile of each light tenant; without them three times its median alone, and twice its
    /// 99th percentile alone and the time of two of the others' requests.
    pub(super) latency: Option<(Duration, Duration)>,
    /// Bytes of the others, as a part of those without a scheduler.
    pub(super) of_none: f64,
}

impl Default for Goal {
    fn default() -> Self {
        Self {
            latency: None,
            of_none: 0.9,
        }
    }
}

/// A modelled drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Model {
    /// 16 units, each of which takes about 80 µs for any request.
    #[default]
    Flash,
    /// 128 such units.
    Wide,
    /// A fixed number of bytes per second for all requests together.
    Bandwidth,
}

/// What changes in the middle of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Nothing,
    /// The first tenant's group gets this weight.
    Weight(u16),
    /// The last tenant of the crowd stops submitting.
    Silence,
}

impl Scene {
    pub(super) fn new(case: impl Into<String>) -> Self {
        Self {
            case: case.into(),
            tree: GroupTree::new(GROUPS_MAX),
            crowd: Vec::new(),
            victim: None,
            goal: Goal::default(),
            turn: Turn::Nothing,
            model: Model::Flash,
            away: Duration::ZERO,
        }
    }

    /// Adds a group with a tenant that wants more than its due.
    pub(super) fn tenant(mut self, parent: GroupId, weight: u16, load: Load) -> Self {
        let group = self.group(parent, weight);
        self.crowd.push(Tenant { group, load });
        self
    }

    /// Adds a group with the light tenant.
    pub(super) fn victim(mut self, weight: u16, load: Load) -> Self {
        let group = self.group(ROOT, weight);
        self.victim = Some(Tenant { group, load });
        self
    }

    /// The same with a goal in microseconds.
    pub(super) const fn with_goal(mut self, p50_us: u64, p99_us: u64, of_none: f64) -> Self {
        self.goal = Goal {
            latency: Some((Duration::from_micros(p50_us), Duration::from_micros(p99_us))),
            of_none,
        };
        self
    }

    /// The light tenants by their places among all.
    pub(super) fn light_places(&self) -> Vec<usize> {
        let is_light = |place: &usize| {
            let of_crowd = self.crowd.get(*place);
            of_crowd.is_none_or(|tenant| tenant.load.is_light())
        };
        (0..self.tenants().len()).filter(is_light).collect()
    }

    /// The same by another name.
    pub(super) fn named(self, case: impl Into<String>) -> Self {
        Self {
            case: case.into(),
            ..self
        }
    }

    /// All tenants, the crowd first.
    pub(super) fn tenants(&self) -> Vec<Tenant> {
        self.crowd.iter().chain(&self.victim).copied().collect()
    }

    /// The weight of a tenant's group.
    pub(super) fn weight(&self, tenant: &Tenant) -> u16 {
        let node = self.tree.get(tenant.group).expect("tenants have groups");
        node.weight
    }

    pub(super) fn group(&mut self, parent: GroupId, weight: u16) -> GroupId {
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

    /// Bytes per second of the drive when each tenant has its due, from its rates without an
    /// elevator: `ios` and `bytes` per second. A drive that takes the same time for each request
    /// serves as many requests, of the sizes that are due.
    pub(super) fn capacity(&self, ios: f64, bytes: f64) -> f64 {
        let due = self.due(&self.tree, &self.crowd);
        let sizes = || self.crowd.iter().map(|tenant| tenant.load.block_bytes);
        if self.model == Model::Bandwidth || sizes().min() == sizes().max() {
            return bytes;
        }
        let ios_per_byte = due.iter().zip(sizes()).map(|(due, size)| due / f64::from(size));
        ios / ios_per_byte.sum::<f64>()
    }

    /// Whether caps at the dues can hold any tenant back: a tenant that is alone is due the whole
    /// drive.
    pub(super) fn caps_can_bind(&self) -> bool {
        self.tenants().len() > 1
    }

    /// The share of the drive that each of `present` is due by the weights in `tree`. The victim's
    /// use of the drive is ignored.
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

/// Holds the groups of the largest scene.
const GROUPS_MAX: u32 = 80;

#[cfg(test)]
mod tests {
    use super::super::cases;

    #[test]
    fn due_shares_follow_the_tree_and_add_up() {
        let scene = cases::nested();
        let due = scene.due(&scene.tree, &scene.crowd);
        for (due, expected) in due.iter().zip([1.0 / 12.0, 3.0 / 12.0, 8.0 / 12.0]) {
            assert!((due - expected).abs() < 1e-9, "{due} for {expected}");
        }
        for scene in cases::all()
            .into_iter()
            .chain(cases::on_file())
            .chain(cases::of_clients())
        {
            let sum: f64 = scene.due(&scene.tree, &scene.crowd).iter().sum();
            assert!((sum - 1.0).abs() < 1e-9, "{}: {sum}", scene.case);
        }
    }

    #[test]
    fn capacity_of_unequal_sizes_is_what_as_many_requests_move_where_all_have_their_due() {
        let scenes = cases::all();
        let of = |case: &str| {
            scenes
                .iter()
                .find(|scene| scene.case == case)
                .expect("the case is there")
        };
        // Requests of 256, 4 and 64 KiB, due 1/7, 2/7 and 4/7 of the bytes: 7 KiB take 1/256 + 2/4
        // + 4/64 requests.
        let mixed = of("weights=1:2:4/writes=256k,4k,64k").capacity(1000.0, 1e9);
        let each = [1.0 / 256.0, 2.0 / 4.0, 4.0 / 64.0].map(|part| part / 1024.0);
        assert!(
            (mixed - 1000.0 * 7.0 / each.iter().sum::<f64>()).abs() < 1.0,
            "{mixed}"
        );
        assert_eq!(of("weights=1:2:4/reads=4k").capacity(1000.0, 4096e3), 4096e3);
        let bandwidth = of("bandwidth=1G/weights=1:2:4/mixed=r4k,w256k,r64k");
        assert_eq!(bandwidth.capacity(1000.0, 1e9), 1e9);
        assert!(!of("alone/reads=4k").caps_can_bind() && bandwidth.caps_can_bind());
    }

    #[test]
    fn share_of_a_silent_group_is_due_to_the_others() {
        let scene = cases::nested();
        let due = scene.due(&scene.tree, &scene.crowd[..2]);
        assert!(
            (due[0] - 0.25).abs() < 1e-9 && (due[1] - 0.75).abs() < 1e-9,
            "{due:?}"
        );
    }
}
