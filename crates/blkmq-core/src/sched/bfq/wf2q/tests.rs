//! The scheduler against the fluid one: generalised processor sharing, in which all that have something are served at the
//! same time by their weights, group by group.

use proptest::prelude::*;

use super::super::idling::Return;
use super::*;

/// What happens to the scheduler; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    /// A leaf gets so many packets of this size.
    Arrive(usize, u32, u32),
    Serve(usize),
    WeighLeaf(usize, u32),
    WeighGroup(usize, u32),
    Move(usize, usize),
}

/// A scheduler whose leaves hold packets.
struct World {
    wf2q: Wf2q,
    groups: usize,
    packets: Vec<Vec<u32>>,
    parents: Vec<usize>,
    served: Vec<u64>,
    /// Leaves that are urgent when they come back.
    urgent: Vec<usize>,
}

impl World {
    /// Leaf `n` is a member of group `n % groups`.
    fn new(groups: usize, leaves: usize) -> Self {
        let mut wf2q = Wf2q::new(groups, leaves);
        for leaf in 0..leaves {
            wf2q.place_leaf(wf2q.leaf(leaf), leaf % groups, 1, 100);
        }
        Self {
            wf2q,
            groups,
            packets: vec![Vec::new(); leaves],
            parents: vec![0; groups],
            served: vec![0; leaves],
            urgent: Vec::new(),
        }
    }

    fn arrive(&mut self, leaf: usize, count: u32, size: u32) {
        let was_empty = self.packets[leaf].is_empty();
        self.packets[leaf].extend((0..count).map(|_| size));
        if was_empty && count > 0 {
            self.wf2q
                .activate(self.wf2q.leaf(leaf), size, self.urgent.contains(&leaf));
        }
    }

    fn serve(&mut self) -> Option<(usize, u32)> {
        let id = self.wf2q.pick(|_| false)?;
        let leaf = self.wf2q.leaf_of(id);
        let size = self.packets[leaf].remove(0);
        self.wf2q.serve(id, size);
        self.wf2q.release(id, self.packets[leaf].first().copied());
        self.served[leaf] += u64::from(size);
        Some((leaf, size))
    }

    /// Moves a group below another one, unless that is below it.
    fn move_group(&mut self, group: usize, parent: usize) {
        let mut at = parent;
        while at != 0 {
            if at == group {
                return;
            }
            at = self.parents[at];
        }
        self.parents[group] = parent;
        self.wf2q.move_group(self.wf2q.group(group), parent);
    }

    fn take(&mut self, step: &Step) {
        let leaves = self.packets.len();
        match *step {
            Step::Arrive(leaf, count, size) => self.arrive(leaf % leaves, count, size),
            Step::Serve(count) => (0..count).for_each(|_| {
                self.serve();
            }),
            Step::WeighLeaf(leaf, weight) => self.wf2q.set_weight(self.wf2q.leaf(leaf % leaves), weight),
            Step::WeighGroup(group, weight) => {
                self.wf2q.set_weight(self.wf2q.group(group % self.groups), weight);
            }
            Step::Move(group, parent) => {
                let group = 1 + group % (self.groups - 1);
                self.move_group(group, parent % self.groups);
            }
        }
        self.wf2q.check(None);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let leaf = 0..12usize;
    let step = prop_oneof![
        6 => (leaf.clone(), 0..5u32, 1..1_000_000u32).prop_map(|(l, n, s)| Step::Arrive(l, n, s)),
        6 => (1..6usize).prop_map(Step::Serve),
        1 => (leaf.clone(), 1..3000u32).prop_map(|(l, w)| Step::WeighLeaf(l, w)),
        1 => (0..5usize, 1..1000u32).prop_map(|(g, w)| Step::WeighGroup(g, w)),
        1 => (0..5usize, 0..5usize).prop_map(|(g, p)| Step::Move(g, p)),
    ];
    prop::collection::vec(step, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn whatever_arrives_moves_or_changes_weight_all_is_served_and_time_never_runs_back(steps in steps()) {
        let mut world = World::new(5, 12);
        let mut times: Vec<Vec<u64>> = vec![vec![0; CLASSES]; 5];
        for step in &steps {
            world.take(step);
            for (tree, last) in world.wf2q.trees.iter().flatten().zip(times.iter_mut().flatten()) {
                prop_assert!(!before(tree.time, *last), "time of a tree ran back");
                *last = tree.time;
            }
        }
        let left: usize = world.packets.iter().map(Vec::len).sum();
        for _ in 0..left {
            prop_assert!(world.serve().is_some());
        }
        prop_assert!(world.serve().is_none());
        world.wf2q.check(None);
    }

    #[test]
    fn service_of_backlogged_leaves_stays_within_a_packet_per_level_of_the_fluid_share(
        weights in prop::collection::vec(1..1000u32, 2..9),
        sizes in prop::collection::vec(prop::sample::select(vec![512u32, 4096, 65536, 262_144]), 9),
    ) {
        let leaves = weights.len();
        let mut world = World::new(1, leaves);
        for leaf in 0..leaves {
            world.wf2q.set_weight(world.wf2q.leaf(leaf), weights[leaf]);
            world.packets[leaf] = vec![sizes[leaf]; 4000];
            world.wf2q.activate(world.wf2q.leaf(leaf), sizes[leaf], false);
        }
        let sum: u64 = weights.iter().map(|&w| u64::from(w)).sum();
        let (mut total, largest) = (0, i128::from(*sizes[..leaves].iter().max().unwrap()));
        for _ in 0..3000 {
            let (_, size) = world.serve().unwrap();
            total += u64::from(size);
            for leaf in 0..leaves {
                let due = i128::from(total) * i128::from(weights[leaf]) / i128::from(sum);
                let error = i128::from(world.served[leaf]) - due;
                let own = i128::from(sizes[leaf]);
                // Bennett and Zhang 1996: behind by one packet of anybody's at most, ahead by less than one's own.
                prop_assert!(-largest - 1 <= error && error <= own + 1, "leaf {leaf}: {error} of {total}");
            }
        }
    }

    #[test]
    fn nested_groups_get_the_product_of_their_shares(
        w in prop::collection::vec(1..1000u32, 6),
        sizes in prop::collection::vec(prop::sample::select(vec![4096u32, 262_144]), 4),
    ) {
        // Root has groups 1 and 2; each of these has two leaves.
        let mut world = World::new(3, 4);
        for (leaf, &size) in sizes.iter().enumerate() {
            let id = world.wf2q.leaf(leaf);
            world.wf2q.place_leaf(id, 1 + leaf / 2, 1, w[2 + leaf]);
            world.packets[leaf] = vec![size; 12_000];
            world.wf2q.activate(id, size, false);
        }
        (0..2).for_each(|group| world.wf2q.set_weight(world.wf2q.group(1 + group), w[group]));
        let start: Vec<u64> = world.served.clone();
        prop_assert_eq!(start, vec![0; 4]);
        let mut total = 0u64;
        for _ in 0..8000 {
            total += u64::from(world.serve().unwrap().1);
        }
        for leaf in 0..4 {
            let group = leaf / 2;
            let of_group = f64::from(w[group]) / f64::from(w[0] + w[1]);
            let pair = f64::from(w[2 + 2 * group] + w[3 + 2 * group]);
            let due = total as f64 * of_group * f64::from(w[2 + leaf]) / pair;
            let error = (world.served[leaf] as f64 - due).abs();
            prop_assert!(error <= 2.0 * 2.0 * 262_144.0, "leaf {leaf}: {error} of {total}");
        }
    }
}

/// Leaves that come and go, against the fluid system fed with the same arrivals: it serves as much in all at each step.
#[test]
fn leaves_that_come_and_go_lag_behind_the_fluid_service_by_two_packets_at_most() {
    const LEAVES: usize = 6;
    const SIZE: u32 = 65_536;
    let weights = [10u32, 20, 40, 80, 160, 320];
    let mut worst = 0.0f64;
    for seed in 1..100u64 {
        let mut chance = seed;
        let mut next = |below: u64| {
            chance = chance
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (chance >> 33) % below
        };
        let mut world = World::new(1, LEAVES);
        for (leaf, &weight) in weights.iter().enumerate() {
            world.wf2q.set_weight(world.wf2q.leaf(leaf), weight);
        }
        let mut fluid = [0.0f64; LEAVES];
        let mut done = [0.0f64; LEAVES];
        for _ in 0..3000 {
            if next(3) > 0 {
                let (leaf, count) = (next(LEAVES as u64) as usize, 1 + next(4) as u32);
                world.arrive(leaf, count, SIZE);
                fluid[leaf] += f64::from(count * SIZE);
            }
            let Some((leaf, size)) = world.serve() else {
                continue;
            };
            done[leaf] += f64::from(size);
            drain(&mut fluid, &weights, f64::from(size));
            for (packets, left) in world.packets.iter().zip(&fluid) {
                // Behind: more left than in the fluid system.
                let behind = packets.len() as f64 * f64::from(SIZE) - left;
                worst = worst.max(behind / f64::from(SIZE));
            }
        }
    }
    assert!(worst <= 2.0, "{worst} packets behind");
}

/// Serves `amount` of the fluid backlogs by weight.
fn drain(backlog: &mut [f64], weights: &[u32], mut amount: f64) {
    while amount > 1e-6 {
        let active = |backlog: &[f64], leaf: usize| backlog[leaf] > 1e-6;
        let sum: f64 = (0..backlog.len())
            .filter(|&l| active(backlog, l))
            .map(|l| f64::from(weights[l]))
            .sum();
        assert!(sum > 0.0, "the fluid system has nothing left");
        let first = (0..backlog.len())
            .filter(|&l| active(backlog, l))
            .map(|l| backlog[l] * sum / f64::from(weights[l]))
            .fold(amount, f64::min);
        for l in 0..backlog.len() {
            if active(backlog, l) {
                backlog[l] = (backlog[l] - first * f64::from(weights[l]) / sum).max(0.0);
            }
        }
        amount -= first;
    }
}

#[test]
fn tags_wrap_around() {
    let mut world = World::new(2, 2);
    world.wf2q.set_weight(world.wf2q.group(1), 100);
    for tree in world.wf2q.trees.iter_mut().flatten() {
        tree.time = u64::MAX - (1 << 20);
    }
    for leaf in 0..2 {
        world.wf2q.place_leaf(world.wf2q.leaf(leaf), leaf, 1, 100);
        world.arrive(leaf, 4000, 4096);
    }
    for _ in 0..4000 {
        world.serve();
        world.wf2q.check(None);
    }
    assert!(world.wf2q.trees[0][1].time < 1 << 60, "it did not wrap around");
    assert!(world.served[0].abs_diff(world.served[1]) <= 2 * 4096);
}

#[test]
fn class_goes_before_the_next_one_unless_the_last_is_due() {
    let mut wf2q = Wf2q::new(1, 3);
    for class in 0..3 {
        wf2q.place_leaf(wf2q.leaf(class), 0, class, 100);
        wf2q.activate(wf2q.leaf(class), 10, false);
    }
    for (due, expected) in [(false, 0), (true, 2), (false, 0)] {
        let id = wf2q.pick(|_| due).unwrap();
        assert_eq!(wf2q.leaf_of(id), expected);
        wf2q.serve(id, 10);
        wf2q.release(id, Some(10));
    }
}

#[test]
fn group_that_moves_while_it_waits_is_served_at_its_new_place() {
    let mut world = World::new(4, 4);
    for leaf in 1..4 {
        world.arrive(leaf, 3000, 4096);
    }
    world.move_group(3, 2);
    (0..1200).for_each(|_| {
        world.serve();
    });
    let served = world.served[1];
    assert!(
        served.abs_diff(600 * 4096) <= 2 * 4096,
        "group 1 has the half of the root: {served}"
    );
    world.move_group(3, 0);
    let before = world.served.clone();
    (0..1200).for_each(|_| {
        world.serve();
    });
    for (now, then) in world.served.iter().zip(&before).skip(1) {
        assert!((now - then).abs_diff(400 * 4096) <= 3 * 4096);
    }
}

#[test]
fn urgent_leaf_within_its_share_goes_next_and_gets_no_more_than_its_share() {
    const FLOODERS: usize = 31;
    let mut world = World::new(1, FLOODERS + 1);
    world.urgent = vec![FLOODERS];
    for leaf in 0..FLOODERS {
        world.arrive(leaf, 2000, 4096);
    }
    (0..500).for_each(|_| {
        world.serve();
    });
    // It comes back every 40 services: less than its share of one in 32.
    for _ in 0..100 {
        world.arrive(FLOODERS, 1, 4096);
        let turn = (1..).find(|_| world.serve().unwrap().0 == FLOODERS).unwrap();
        assert!(turn <= 2, "it had to wait for {turn} services");
        (turn..40).for_each(|_| {
            world.serve();
        });
    }
    // And now it always comes back at once.
    let before = world.served.clone();
    for _ in 0..32 * 200 {
        if world.packets[FLOODERS].is_empty() {
            world.arrive(FLOODERS, 1, 4096);
        }
        world.serve();
    }
    for (leaf, (now, then)) in world.served.iter().zip(&before).enumerate() {
        let got = now - then;
        assert!(got.abs_diff(200 * 4096) <= 3 * 4096, "leaf {leaf} got {got}");
    }
}

/// Three groups of one leaf each: a flood with a backlog, a slow one with all its requests in flight, and one that asks
/// for less than its due and has nothing yet.
fn flood_slow_and_modest() -> World {
    let mut world = World::new(4, 4);
    world.wf2q.set_rate(1_000_000);
    world.wf2q.set_lead_max(1 << 20);
    for leaf in [1, 2] {
        world
            .wf2q
            .begin(world.wf2q.leaf(leaf), |_, _| Return::OF_NEWCOMER);
    }
    world.arrive(2, 1, 1000);
    world.serve();
    world.arrive(1, 100, 1000);
    world
}

fn arrive_modestly(world: &mut World) {
    let leaf = world.wf2q.leaf(3);
    world.wf2q.begin(leaf, |_, _| Return {
        is_moment: false,
        asks: 1000,
        modest_until: u64::MAX,
    });
    world.arrive(3, 1, 1000);
}

#[test]
fn modest_member_is_served_beside_the_only_one_whoever_is_before_it() {
    let mut world = flood_slow_and_modest();
    arrive_modestly(&mut world);
    // The flood is before it.
    world.wf2q.set_only(Some(world.wf2q.group(2)));
    assert_eq!(world.serve(), Some((3, 1000)));
    assert_eq!(world.serve(), None);
    world.wf2q.set_only(None);
    assert_eq!(world.serve(), Some((1, 1000)));
}

#[test]
fn modest_member_is_not_held_for_a_slow_one() {
    let mut world = flood_slow_and_modest();
    (0..50).for_each(|_| assert_eq!(world.serve(), Some((1, 1000))));
    arrive_modestly(&mut world);
    assert_eq!(world.serve(), Some((3, 1000)));
    world.wf2q.end(world.wf2q.leaf(3), |_| {});
    world.wf2q.set_lead_max(1);
    assert_eq!(world.serve(), None, "the flood is held");
    arrive_modestly(&mut world);
    assert_eq!(world.serve(), Some((3, 1000)));
}

/// Two groups of one leaf each with a backlog: one of ten times the other's weight that is passed over, and that has had
/// nothing for long.
fn passed_over_with_a_due() -> World {
    let mut world = World::new(4, 4);
    world.urgent = vec![3];
    world.wf2q.set_rate(1_000_000);
    world.wf2q.set_lead_max(LEAD_MAX.into());
    let heavy = world.wf2q.group(2);
    world.wf2q.set_weight(world.wf2q.group(1), 100);
    world.wf2q.set_weight(heavy, 1000);
    world.wf2q.set_weight(world.wf2q.group(3), 100);
    for leaf in [1, 2] {
        world
            .wf2q
            .begin(world.wf2q.leaf(leaf), |_, _| Return::OF_NEWCOMER);
    }
    world.wf2q.pass_over(heavy, COUNTS_ALL);
    world.arrive(1, 1000, 1000);
    (0..500).for_each(|_| assert_eq!(world.serve(), Some((1, 1000))));
    world.arrive(2, 1000, 1000);
    world
}

const LEAD_MAX: u32 = 10_000;

#[test]
fn due_of_one_that_is_passed_over_does_not_grow_with_its_weight() {
    let mut world = passed_over_with_a_due();
    let turn = (0..).find(|_| world.serve().unwrap().0 == 1).unwrap();
    assert!(
        turn <= 16 * LEAD_MAX / 1000,
        "the other waits for {turn} services"
    );
}

#[test]
fn modest_urgent_member_does_not_wait_for_anothers_due() {
    let mut world = passed_over_with_a_due();
    assert_eq!(world.serve(), Some((2, 1000)));
    arrive_modestly(&mut world);
    assert_eq!(world.serve(), Some((3, 1000)));
    assert_eq!(world.serve(), Some((2, 1000)));
}

#[test]
fn smaller_weight_leaves_nobody_due_more_than_before() {
    let mut world = World::new(3, 3);
    world.wf2q.set_lead_max(LEAD_MAX.into());
    let set = |world: &mut World, weights: [u32; 2]| {
        for (group, weight) in (1..).zip(weights) {
            world.wf2q.set_weight(world.wf2q.group(group), weight);
        }
    };
    set(&mut world, [100, 1000]);
    for leaf in [1, 2] {
        world
            .wf2q
            .begin(world.wf2q.leaf(leaf), |_, _| Return::OF_NEWCOMER);
    }
    world.arrive(1, 20_000, 1000);
    world.arrive(2, 1, 1000);
    // The second misses service, as during a probe of the first.
    world.wf2q.set_only(Some(world.wf2q.group(1)));
    world.wf2q.set_open(true);
    (0..600).for_each(|_| assert_eq!(world.serve(), Some((1, 1000))));
    world.wf2q.set_only(None);
    world.wf2q.set_open(false);
    // What the second is due is far more at its small weight, and the first was brought to it.
    set(&mut world, [101, 1]);
    set(&mut world, [100, 300]);
    let mut served = || {
        // The longest time for which one may be due something.
        for _ in 0..64 * LEAD_MAX / 1000 {
            if world.packets[2].is_empty() {
                world.arrive(2, 1, 1000);
            }
            world.serve();
        }
        [1, 2].map(|leaf| world.served[leaf] / 1000)
    };
    let (before, after) = (served(), served());
    let [first, second] = [0, 1].map(|of| after[of] - before[of]);
    assert!(
        second.abs_diff(3 * first) <= 6,
        "at three times the weight: {second} beside {first}"
    );
}
