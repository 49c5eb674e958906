//! What QEMU's own tests of the format try: disks that QEMU and this driver write in turns, images of odd shapes, and
//! QEMU's commands on images that were written here.

use blkmq_host::device::Extent;

use super::*;

/// Something that is done to a disk, by whoever serves it: to bytes from here on, so many.
#[derive(Clone, Copy, Debug)]
enum Step {
    Write(u64, u64, u8),
    Zero(u64, u64),
    /// Zeroing that may give the space back.
    Unmap(u64, u64),
    /// Of whole clusters, which are zeroes then.
    Discard(u64, u64),
    /// Of one cluster. Only QEMU does it; here it is a write.
    Compressed(u64, u64, u8),
}

impl Step {
    /// By chance, on a disk of `size` bytes in clusters of `cluster`.
    fn any(chance: &mut Chance, size: u64, cluster: u64) -> Self {
        let mut below = |max: u64| chance.bits() % max;
        let len = match below(3) {
            0 => 512 * (below(16) + 1),
            1 => 4096 * (below(40) + 1),
            _ => cluster * (below(3) + 1),
        };
        let len = len.min(size);
        let at = below((size - len) / 512 + 1) * 512;
        let first = below(size / cluster) * cluster;
        let whole = (cluster * (below(4) + 1)).min(size - first);
        let fill = below(255) as u8 + 1;
        match below(8) {
            0 => Self::Zero(at, len),
            1 => Self::Unmap(at, len),
            2 => Self::Unmap(first, whole),
            3 => Self::Discard(first, whole),
            4 if first + cluster <= size => Self::Compressed(first, cluster, fill),
            _ => Self::Write(at, len, fill),
        }
    }

    /// As `qemu-io` is told.
    fn words(self) -> Vec<String> {
        let word = match self {
            Self::Write(at, len, fill) => format!("write -P {fill} {at} {len}"),
            Self::Zero(at, len) => format!("write -z {at} {len}"),
            Self::Unmap(at, len) => format!("write -z -u {at} {len}"),
            Self::Discard(at, len) => format!("discard {at} {len}"),
            Self::Compressed(at, len, fill) => {
                // QEMU compresses nothing into a cluster that is there.
                let discard = Self::Discard(at, len).words();
                return [discard, vec![format!("write -c -P {fill} {at} {len}")]].concat();
            }
        };
        vec![word]
    }

    fn run(self, rig: &mut Rig) {
        let zero = |flags, at, len| flagged(Op::WriteZeroes, flags, at, len);
        let status = match self {
            Self::Write(at, len, fill) | Self::Compressed(at, len, fill) => {
                rig.write(Flags::NONE, at, &vec![fill; len as usize])
            }
            Self::Zero(at, len) => rig.run(zero(Flags::NO_UNMAP, at, len)),
            Self::Unmap(at, len) => rig.run(zero(Flags::NONE, at, len)),
            Self::Discard(at, len) => rig.run(request(Op::Discard, at, len)),
        };
        assert_eq!(status, Status::Ok, "{self:?}");
    }

    /// What is to be read then.
    fn note(self, content: &mut [u8]) {
        let (at, len, fill) = match self {
            Self::Write(at, len, fill) | Self::Compressed(at, len, fill) => (at, len, fill),
            Self::Zero(at, len) | Self::Unmap(at, len) | Self::Discard(at, len) => (at, len, 0),
        };
        content[at as usize..(at + len) as usize].fill(fill);
    }
}

/// Does things to an image by chance, here.
fn change(path: &Path, chance: &mut Chance, content: &mut [u8], count: u32) {
    let mut rig = Rig::at(path);
    assert!(rig.read(0, content.len()) == content, "{path:?}: before");
    for _ in 0..count {
        let step = Step::any(chance, content.len() as u64, 65536);
        step.run(&mut rig);
        step.note(content);
    }
    rig.flush();
    assert!(rig.read(0, content.len()) == content, "{path:?}: after");
}

/// Has QEMU do these, and only these, things to an image.
fn qemu_io(scratch: &Scratch, image: &str, words: &[String]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2", "-d", "unmap"]);
    for word in words {
        command.args(["-c", word]);
    }
    let output = command.arg(image).current_dir(&scratch.0).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(
        output.status.success() && !text.contains("failed"),
        "{words:?}: {text}"
    );
}

/// Whether QEMU reads this, and finds nothing wrong.
fn is_as_wanted(scratch: &Scratch, path: &Path, content: &[u8], what: &str) {
    let found = raw_content(scratch, path);
    let differs = found
        .iter()
        .zip(content)
        .position(|(found, wanted)| found != wanted);
    assert_eq!((found.len(), differs), (content.len(), None), "{what}");
    check(scratch, path);
}

/// Where QEMU finds zeroes by the tables alone: the first byte of each run, and whether it is one.
fn map_of_qemu(scratch: &Scratch) -> Vec<(u64, bool)> {
    let map = qemu(scratch, "qemu-img", "map -f qcow2 --output=json image").unwrap();
    let mut runs = Vec::new();
    for line in map.lines().filter(|line| line.contains("\"start\"")) {
        let start = line.split("\"start\": ").nth(1).unwrap();
        let start = start.split(',').next().unwrap().parse().unwrap();
        // What is stored, and a hole of the file, is zeroes as well.
        runs.push((
            start,
            line.contains("\"zero\": true") && line.contains("\"data\": false"),
        ));
    }
    runs.dedup_by_key(|(_, is_zero)| *is_zero);
    runs
}

fn map_of_ours(rig: &Rig, size: u64) -> Vec<(u64, bool)> {
    let (mut runs, mut at) = (Vec::new(), 0);
    while at < size {
        let mut extents: Vec<Extent> = Vec::new();
        rig.device
            .extents(DiskId(0), at, size - at, 64, &mut extents)
            .unwrap();
        for extent in extents {
            runs.push((at, extent.zero));
            at += extent.len;
        }
    }
    runs.dedup_by_key(|(_, is_zero)| *is_zero);
    runs
}

#[test]
fn disks_that_qemu_and_this_driver_write_in_turns_are_what_both_wrote() {
    let shapes = [
        ("", "4M"),
        ("-o compat=0.10", "4M"),
        ("-o cluster_size=4096", "4M"),
        ("-o cluster_size=2M", "12M"),
        ("-o extended_l2=on", "4M"),
        ("-o preallocation=metadata", "4M"),
        ("-o data_file=image.data", "4M"),
        ("-b base -F raw", "4M"),
        ("-b base -F raw -o cluster_size=512", "2M"),
        ("-b base -F raw -o extended_l2=on,cluster_size=32k", "4M"),
        ("-b packed -F qcow2", "4000256"),
        ("-b short -F qcow2", "4M"),
    ];
    for (seed, (options, size)) in (1..).zip(shapes) {
        let scratch = Scratch::new("turns");
        let noise: Vec<u8> = (0..3 << 20).map(|at: u32| ((at / 700) ^ at) as u8).collect();
        std::fs::write(scratch.path("base"), &noise).unwrap();
        for words in [
            "convert -c -f raw -O qcow2 base packed",
            "create -q -f qcow2 -b base -F raw short 1000448",
            &format!("create -q -f qcow2 {options} image {size}"),
        ] {
            if qemu(&scratch, "qemu-img", words).is_none() {
                return;
            }
        }
        let path = scratch.path("image");
        let mut content = raw_content(&scratch, &path);
        let cluster = match options {
            options if options.contains("=4096") => 4096,
            options if options.contains("=512") => 512,
            options if options.contains("=2M") => 2 << 20,
            options if options.contains("=32k") => 32 << 10,
            _ => 65536,
        };
        // QEMU compresses nothing into them.
        let compresses = !options.contains("data_file");
        let mut chance = Chance::new(seed, 5);
        for round in 0..4 * repetitions() {
            let what = format!("{options:?}: seed {seed}, round {round}");
            let mut rig = Rig::at(&path);
            assert!(rig.read(0, content.len()) == content, "{what}: before");
            let map = map_of_ours(&rig, content.len() as u64);
            drop(rig);
            assert_eq!(map, map_of_qemu(&scratch), "{what}");
            let mut rig = (round % 2 == 0).then(|| Rig::at(&path));
            let mut commands = vec![Vec::new()];
            for _ in 0..10 {
                let step = match Step::any(&mut chance, content.len() as u64, cluster) {
                    Step::Compressed(at, len, fill) if !compresses => Step::Write(at, len, fill),
                    step => step,
                };
                step.note(&mut content);
                match &mut rig {
                    Some(rig) => step.run(rig),
                    None => commands.last_mut().unwrap().extend(step.words()),
                }
                if matches!(step, Step::Compressed(..)) {
                    // QEMU 7.2 goes on compressing into a cluster that was freed meanwhile and has other data by then. In
                    // a process of its own it begins a new one.
                    commands.push(Vec::new());
                }
            }
            match rig {
                Some(mut rig) => rig.flush(),
                None => commands
                    .iter()
                    .for_each(|words| qemu_io(&scratch, "image", words)),
            }
            is_as_wanted(&scratch, &path, &content, &format!("{what}: {commands:?}"));
        }
    }
}

#[test]
fn refcounts_of_all_widths_survive_snapshots_and_what_is_shared_by_compression() {
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        let scratch = Scratch::new("widths");
        let options = format!("-o cluster_size=4096,refcount_bits={bits} image 2M");
        if !created(&scratch, &options) {
            return;
        }
        let path = scratch.path("image");
        let mut content = vec![0; 2 << 20];
        let mut chance = Chance::new(bits, 6);
        change(&path, &mut chance, &mut content, 20);
        let what = format!("refcounts of {bits} bits");
        if bits == 1 {
            is_as_wanted(&scratch, &path, &content, &what);
            continue;
        }
        // Many of them in one cluster of the file, which each counts.
        for at in (0..if bits >= 8 { 1 << 20 } else { 0 }).step_by(4096) {
            if chance.bits().is_multiple_of(8) {
                let step = Step::Compressed(at, 4096, (at >> 12) as u8 | 1);
                qemu_io(&scratch, "image", &step.words());
                step.note(&mut content);
            }
        }
        qemu(&scratch, "qemu-img", "snapshot -c first image");
        change(&path, &mut chance, &mut content, 20);
        let kept = content.clone();
        qemu(&scratch, "qemu-img", "snapshot -c second image");
        change(&path, &mut chance, &mut content, 20);
        is_as_wanted(&scratch, &path, &content, &what);
        qemu(&scratch, "qemu-img", "snapshot -d first image");
        change(&path, &mut chance, &mut content, 20);
        is_as_wanted(&scratch, &path, &content, &what);
        qemu(&scratch, "qemu-img", "snapshot -a second image");
        content.copy_from_slice(&kept);
        change(&path, &mut chance, &mut content, 20);
        is_as_wanted(&scratch, &path, &content, &what);
    }
}

/// What a file does not have reads as zeroes, also in the middle of a cluster, and of a sector.
#[test]
fn image_whose_file_ends_inside_a_cluster_reads_zeroes_behind_that() {
    for cut in [512, 4096, 30_000, 30_001, 65_535] {
        for direct in [Direct::Auto, Direct::Off] {
            let scratch = Scratch::new("ends");
            if !created(&scratch, "image 1M") {
                return;
            }
            let path = scratch.path("image");
            qemu_io(&scratch, "image", &["write -P 7 0 128k".to_owned()]);
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(file.metadata().unwrap().len() - cut).unwrap();
            let mut content = raw_content(&scratch, &path);
            assert_eq!(content[128 << 10..][..1], [0], "it is behind what was written");
            let what = format!("{cut} bytes are missing, {direct:?}");
            assert!(content[..128 << 10].contains(&0), "{what}: no test");
            let mut rig = Rig::open(&Qcow2Config {
                direct,
                ..config(&path)
            });
            assert!(rig.read(0, 1 << 20) == content, "{what}");
            for step in [Step::Write(127 << 10, 512, 8), Step::Write(1 << 19, 4096, 9)] {
                step.run(&mut rig);
                step.note(&mut content);
            }
            rig.flush();
            assert!(rig.read(0, 1 << 20) == content, "{what}: after writes");
            drop(rig);
            is_as_wanted(&scratch, &path, &content, &what);
        }
    }
}

/// Clusters of zeroes that have a place keep it; what was there before is never seen again.
#[test]
fn clusters_of_zeroes_that_have_a_place_show_nothing_of_what_was_there() {
    for options in ["", "-o extended_l2=on", "-b base -F raw"] {
        let scratch = Scratch::new("zeroed");
        std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
        if !created(&scratch, &format!("{options} image 1M")) {
            return;
        }
        let path = scratch.path("image");
        let words = ["write -P 7 0 1M", "write -z 0 512k", "write -z 600k 3k"];
        qemu_io(&scratch, "image", &words.map(str::to_owned));
        let mut content = raw_content(&scratch, &path);
        let mut rig = Rig::at(&path);
        assert!(rig.read(0, 1 << 20) == content, "{options}");
        for step in [
            Step::Write(512, 512, 8),
            Step::Write(130_000 / 512 * 512, 70_000 / 512 * 512, 9),
            Step::Write(256 << 10, 64 << 10, 10),
            Step::Discard(320 << 10, 64 << 10),
            Step::Write(330 << 10, 512, 11),
        ] {
            step.run(&mut rig);
            step.note(&mut content);
        }
        assert!(rig.read(0, 1 << 20) == content, "{options}: after writes");
        rig.flush();
        drop(rig);
        is_as_wanted(&scratch, &path, &content, options);
    }
}

#[test]
fn image_stays_right_through_all_that_qemu_img_does_to_it() {
    let scratch = Scratch::new("commands");
    let noise: Vec<u8> = (0..5_000_192).map(|at: u32| ((at / 900) ^ at) as u8).collect();
    std::fs::write(scratch.path("base"), &noise).unwrap();
    std::fs::write(scratch.path("other"), &noise[1000..3_001_000]).unwrap();
    if !created(&scratch, "-o compat=0.10 -b base -F raw image 8M") {
        return;
    }
    let path = scratch.path("image");
    let mut content = raw_content(&scratch, &path);
    let mut chance = Chance::new(9, 7);
    // Discards of version 2 on a base leave what is there.
    for words in [
        "amend -f qcow2 -o compat=1.1 image",
        "amend -f qcow2 -o refcount_bits=64 image",
        "rebase -f qcow2 -b other -F raw image",
        "resize -f qcow2 image 12M",
        "amend -f qcow2 -o lazy_refcounts=on image",
        "resize -f qcow2 --shrink image 6M",
        "resize -f qcow2 image 7M",
        "snapshot -c here image",
        "snapshot -d here image",
        "resize --preallocation=falloc -f qcow2 image 9M",
        "commit -q -f qcow2 image",
        "rebase -f qcow2 -b base -F raw image",
        "check -f qcow2 -r all image",
        "rebase -f qcow2 -b  image",
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let output = Command::new("qemu-img")
            .args(&words)
            .current_dir(&scratch.0)
            .output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {said}");
        let size = |word: &str| word.strip_suffix('M').and_then(|size| size.parse::<usize>().ok());
        if let Some(size) = words.last().and_then(|word| size(word)) {
            content.resize(size << 20, 0);
        }
        let what = words.join(" ");
        is_as_wanted(&scratch, &path, &content, &what);
        if words[0] == "commit" {
            let found = std::fs::read(scratch.path("other")).unwrap();
            assert!(found == content, "{what}: the base");
        }
        change(&path, &mut chance, &mut content, 12);
        is_as_wanted(&scratch, &path, &content, &what);
    }
    let info = qemu(&scratch, "qemu-img", "info image").unwrap();
    assert!(!info.contains("backing file"), "{info}");
}

/// A snapshot inside has the size of its moment.
#[test]
fn image_that_grows_keeps_snapshots_of_smaller_disks() {
    let scratch = Scratch::new("smaller");
    if !created(&scratch, "-o cluster_size=4096 image 2M") {
        return;
    }
    let path = scratch.path("image");
    let mut content = vec![0; 2 << 20];
    let mut chance = Chance::new(3, 8);
    change(&path, &mut chance, &mut content, 20);
    qemu(&scratch, "qemu-img", "snapshot -c small image");
    let small = content.clone();
    let mut rig = Rig::at(&path);
    let grown = rig.device.resize(DiskId(0), Some(64 << 20));
    assert_eq!(grown.unwrap(), 64 << 20);
    content.resize(64 << 20, 0);
    for step in [
        Step::Write((64 << 20) - 512, 512, 9),
        Step::Write(1 << 20, 8192, 8),
    ] {
        step.run(&mut rig);
        step.note(&mut content);
    }
    rig.flush();
    drop(rig);
    is_as_wanted(&scratch, &path, &content, "grown");
    change(&path, &mut chance, &mut content, 20);
    qemu(&scratch, "qemu-img", "snapshot -a small image");
    content = small;
    is_as_wanted(&scratch, &path, &content, "small again");
    change(&path, &mut chance, &mut content, 20);
    is_as_wanted(&scratch, &path, &content, "small again, and written");
}
