//! The cases of the fairness bench: which tenants share a drive, one line each if they differ only in
//! numbers. Modelled drives have all of them; a file and the comparison with the kernel have those that a
//! file can distinguish; clients have those in `of_clients`.

use std::time::Duration;

use blkmq_core::bio::Op;
use blkmq_core::group::{ROOT, WEIGHT_MAX};

use super::scene::{Goal, Load, Model, Scene, Turn};

/// All cases of the modelled drives.
pub(super) fn all() -> Vec<Scene> {
    let mut scenes = on_flash();
    for (prefix, model) in [("128-units", Model::Wide), ("bandwidth=1G", Model::Bandwidth)] {
        scenes.extend(on_other_models().into_iter().map(|scene| Scene {
            model,
            case: format!("{prefix}/{}", scene.case),
            ..scene
        }));
    }
    scenes
}

/// The cases of a file, all with flat groups, which the kernel's schedulers support as well.
pub(super) fn on_file() -> Vec<Scene> {
    let weights: [&[u16]; 3] = [&[1, 2], &[1, 10], &[1, 2, 4]];
    let mut scenes = Vec::new();
    for weights in weights {
        for depth in [4, 16, 64] {
            for sizes in [&[4][..], &[64], &MIXED_KIB[..weights.len()]] {
                scenes.push(mix(weights, sizes, &[depth]));
            }
        }
    }
    scenes.extend(of_unequal_depths());
    scenes.extend(victims());
    scenes
}

/// The cases of clients in processes of their own.
pub(super) fn of_clients() -> Vec<Scene> {
    let mut scenes = Vec::new();
    scenes.extend([16, 4, 64].map(|depth| mix(&[1, 2, 4], &[64], &[depth])));
    scenes.extend([4, 16, 256].map(|size| mix(&[1, 2, 4], &[size], &[16])));
    scenes.push(mix(&[1, 2], &[64], &[16]));
    scenes.extend([16, 4, 64].map(|depth| mix(&[1, 10], &[64], &[depth])));
    scenes.push(mix(&[1, 2, 4], &MIXED_KIB, &[16]));
    scenes.extend(of_unequal_depths());
    scenes.extend(victims());
    scenes.extend(with_pauses());
    scenes
}

/// A light tenant that pauses between its reads, beside floods of the same weight.
pub(super) fn with_pauses() -> Vec<Scene> {
    let light = Load::reads(4096, 1);
    let flood = Load::reads(64 << 10, FLOOD_DEPTH);
    let beside = |flood: Load, rate: u32| {
        let case = format!("pause/1x4k@{rate}+{flood}");
        Scene::new(case)
            .tenant(ROOT, 100, flood)
            .victim(100, light.at(rate))
    };
    let mut scenes = vec![beside(flood, 200).with_goal(350, 1000, 0.9)];
    scenes.extend([50, 1000, 5000].map(|rate| beside(flood, rate)));
    scenes.push(beside(Load::random(Op::Write, 256 << 10, FLOOD_DEPTH), 200));
    scenes.push(beside(Load::reads(4096, 256), 200));
    let mut mix = Scene::new("pause/8x4k@200+2x16k@1000+2x32x64k");
    for load in [flood; 2]
        .into_iter()
        .chain([Load::reads(16 << 10, 1).at(1000); 2])
    {
        mix = mix.tenant(ROOT, 100, load);
    }
    mix = (0..7).fold(mix, |mix, _| mix.tenant(ROOT, 100, light.at(200)));
    scenes.push(mix.victim(100, light.at(200)));
    let bursts = Load::reads(4096, 8).in_bursts(20);
    scenes.push(
        Scene::new(format!("pause/{bursts}+{flood}"))
            .tenant(ROOT, 100, flood)
            .victim(100, bursts),
    );
    for others in [7, 29] {
        let scene = Scene::new(format!("pause/{}x4k@200+{flood}", others + 1)).tenant(ROOT, 100, flood);
        let scene = (0..others).fold(scene, |scene, _| scene.tenant(ROOT, 100, light.at(200)));
        scenes.push(scene.victim(100, light.at(200)));
    }
    scenes
}

/// The same on modelled drives, with the keys of their null disks.
pub(super) fn on_models() -> Vec<(Scene, &'static str)> {
    let named = |mut scene: Scene, model: &str| {
        // Goals in time are those of one drive.
        scene.goal = Goal::default();
        let case = format!("model/{model}/{}", scene.case);
        scene.named(case)
    };
    let mut cases = Vec::new();
    for (place, scene) in with_pauses().into_iter().enumerate() {
        let floods = scene.crowd.iter().filter(|tenant| !tenant.load.is_light());
        let scene = match floods.count() {
            2 => named(scene, "300M").with_goal(700, 1600, 0.85),
            _ if place == 0 => named(scene, "300M").with_goal(500, 1000, 0.95),
            _ => named(scene, "300M"),
        };
        cases.push((scene, MODEL_300M));
    }
    let of_first = with_pauses().into_iter().next().expect("there are cases");
    cases.extend(MODELS.map(|(model, keys)| (named(of_first.clone(), model), keys)));
    cases
}

/// The case whose drive is a disk of another server.
pub(super) fn over_nbd() -> Scene {
    let scene = mix(&[1, 2, 4], &[64], &[16]);
    let case = format!("nbd/{}", scene.case);
    scene.named(case)
}

/// Two customers of weights 1 and 2; the first has two machines of weights 1 and 3.
pub(super) fn nested() -> Scene {
    let mut scene = Scene::new("nested=1(1:3):2/reads=4k");
    let customer = scene.group(ROOT, 100);
    let load = Load::reads(4096, CROWD_DEPTH);
    scene
        .tenant(customer, 100, load)
        .tenant(customer, 300, load)
        .tenant(ROOT, 200, load)
}

/// The factor from these weights to those of groups: a hundred, or less if a weight would become
/// too large.
pub(super) fn scale(weights: impl IntoIterator<Item = u16>) -> u16 {
    let largest = weights.into_iter().max().unwrap_or(1).max(1);
    (WEIGHT_MAX / largest).clamp(1, 100)
}

/// A tenant for each weight, the sizes and depths in turn: `1:2:4/16k,256k,64k/16`.
fn mix(weights: &[u16], sizes_kib: &[u32], depths: &[u32]) -> Scene {
    let scale = scale(weights.iter().copied());
    let sizes: Vec<String> = sizes_kib.iter().map(|size| format!("{size}k")).collect();
    let case = format!("{}/{}/{}", join(weights, ":"), sizes.join(","), join(depths, ","));
    let loads = sizes_kib.iter().cycle().zip(depths.iter().cycle());
    let mut scene = Scene::new(case);
    for (weight, (size, depth)) in weights.iter().zip(loads) {
        scene = scene.tenant(ROOT, weight * scale, Load::reads(size << 10, *depth));
    }
    scene
}

fn join<T: ToString>(numbers: &[T], between: &str) -> String {
    let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    words.join(between)
}

/// Tenants of which some have fewer bytes under way than others.
fn of_unequal_depths() -> [Scene; 3] {
    [
        mix(&[1, 2], &[64], &[64, 4]).named("1x64:2x4/64k"),
        mix(&[1, 2, 4], &[64], &[1, 16, 64]),
        mix(&[1, 2, 4], &[64], &[64, 16, 4]),
    ]
}

fn victims() -> [Scene; 2] {
    [
        isolation(8, 4096).named("victim/4k reads"),
        isolation(8, 256 << 10).named("victim/256k writes"),
    ]
}

fn on_flash() -> Vec<Scene> {
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
    let load = Load::reads(4096, CROWD_DEPTH);
    scenes.push(Scene::new("alone/reads=4k").tenant(ROOT, 100, load));
    let equals = |case| Scene::new(case).tenant(ROOT, 100, load).tenant(ROOT, 100, load);
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

fn on_other_models() -> [Scene; 4] {
    [
        weights("weights=1:2:4/reads=4k", [Op::Read; 3], [4096; 3]),
        weights(
            "weights=1:2:4/mixed=r4k,w256k,r64k",
            [Op::Read, Op::Write, Op::Read],
            [4096, 256 << 10, 64 << 10],
        ),
        isolation(8, 4096),
        isolation(8, 256 << 10),
    ]
}

fn weights(case: &str, ops: [Op; 3], block_bytes: [u32; 3]) -> Scene {
    let mut scene = Scene::new(case);
    for ((weight, op), block_bytes) in [100, 200, 400].into_iter().zip(ops).zip(block_bytes) {
        scene = scene.tenant(ROOT, weight, Load::random(op, block_bytes, CROWD_DEPTH));
    }
    scene
}

fn many(tenants: u32) -> Scene {
    let weights = [100, 200, 400].into_iter().cycle().take(tenants as usize);
    weights.fold(
        Scene::new(format!("groups={tenants}/weights=1:2:4…/reads=4k")),
        |scene, weight| scene.tenant(ROOT, weight, Load::reads(4096, FLOOD_DEPTH)),
    )
}

/// A reader of one 4 KiB block at a time, with many tenants that flood the drive, all of the same
/// weight.
fn isolation(flooders: u32, block_bytes: u32) -> Scene {
    let op = if block_bytes == 4096 { Op::Read } else { Op::Write };
    let what = if op == Op::Read { "r4k" } else { "w256k" };
    let mut scene = Scene::new(format!("victim=r4k/flooders={flooders}x{FLOOD_DEPTH}{what}"));
    for _ in 0..flooders {
        scene = scene.tenant(ROOT, 100, Load::random(op, block_bytes, FLOOD_DEPTH));
    }
    scene.victim(100, Load::reads(4096, 1))
}

/// About how long another program keeps a processor at a time.
const AWAY: Duration = Duration::from_millis(3);
/// Modelled drives: their keys in `[disk.NAME]`.
const MODEL_300M: &str = "latency = \"100us\"\nparallel = 4\nbandwidth = \"300M\"\n";
const MODELS: [(&str, &str); 4] = [
    ("1G", "latency = \"100us\"\nparallel = 8\nbandwidth = \"1G\"\n"),
    (
        "16x80us",
        "latency = \"80us\"\nspread = \"16us\"\nparallel = 16\n",
    ),
    (
        "128x80us",
        "latency = \"80us\"\nspread = \"16us\"\nparallel = 128\n",
    ),
    (
        "300M+20ms",
        "latency = \"100us\"\nparallel = 4\nbandwidth = \"300M\"\nslow_rate = 0.0002\nslow = \"20ms\"\n",
    ),
];
const CROWD_DEPTH: u32 = 64;
const FLOOD_DEPTH: u32 = 32;
const MIXED_KIB: [u32; 3] = [16, 256, 64];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn case_is_named_by_its_weights_sizes_and_depths() {
        let scene = mix(&[1, 10], &[16, 256], &[4]);
        assert_eq!(scene.case, "1:10/16k,256k/4");
        let shown: Vec<(u16, String)> = scene
            .crowd
            .iter()
            .map(|tenant| (scene.weight(tenant), tenant.load.to_string()))
            .collect();
        assert_eq!(shown, [(100, "4x16k".into()), (1000, "4x256k".into())]);
    }

    #[test]
    fn no_two_cases_of_a_table_have_the_same_name() {
        for table in [all(), on_file(), of_clients()] {
            let names: BTreeSet<&str> = table.iter().map(|scene| scene.case.as_str()).collect();
            assert_eq!(names.len(), table.len());
        }
    }

    #[test]
    fn tenants_that_pause_are_those_of_clients_alone() {
        let pausing = |scenes: Vec<Scene>| {
            let pauses = |scene: &Scene| scene.tenants().iter().any(|tenant| tenant.load.is_light());
            scenes.iter().filter(|scene| pauses(scene)).count()
        };
        assert_eq!((pausing(all()), pausing(on_file())), (0, 0));
        assert_eq!(pausing(of_clients()), with_pauses().len());
    }

    #[test]
    fn goals_of_the_mix_and_of_the_first_model_are_their_own() {
        let goal = |name: &str| {
            let models = on_models();
            let found = models.iter().find(|(scene, _)| scene.case == name);
            found.expect("the case is there").0.goal
        };
        let mix = goal("model/300M/pause/8x4k@200+2x16k@1000+2x32x64k");
        assert_eq!(
            (mix.latency.unwrap().1, mix.of_none),
            (Duration::from_micros(1600), 0.85)
        );
        let first = goal("model/300M/pause/1x4k@200+32x64k");
        assert_eq!(
            (first.latency.unwrap().0, first.of_none),
            (Duration::from_micros(500), 0.95)
        );
        assert_eq!(goal("model/1G/pause/1x4k@200+32x64k"), Goal::default());
        assert_eq!(goal("model/300M/pause/1x4k@50+32x64k"), Goal::default());
    }

    #[test]
    fn weights_are_scaled_as_far_as_groups_allow() {
        assert_eq!(scale([1, 2, 4]), 100);
        assert_eq!(scale([1, 10]), 100);
        assert_eq!(scale([1, 64]), 15);
        assert_eq!(scale([1000]), 1);
    }
}
