//! Tests of images with the tools of QEMU, which make them, read them and check them; with real rings, files and
//! threads.

mod bitmaps;
mod committed;
mod committed_under_load;
mod created;
mod foreign;
mod ordered;
mod parts;
mod replaced;
mod rig;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{HctxDriver, Issued};
use blkmq_core::ids::DiskId;
use blkmq_core::time::Instant;
use blkmq_host::device::{Allocation, Device, Replacement};

use self::rig::*;
use super::*;
use crate::chance::Chance;
use crate::file::Direct;
use crate::mapping::Mapping;
use crate::testing::{cookie, flagged, lend, request, request_with};

/// Does things by chance to an image and to its copy in memory, and compares.
///
/// `BLKMQ_STEPS` times as many for a long run: `BLKMQ_STEPS=20 cargo test -p blkmq-drivers --lib qcow2`.
fn exercise(scratch: &Scratch, config: &Qcow2Config, seed: u64, steps: u32) {
    let steps = steps * repetitions();
    let mut chance = Chance::new(seed, 0);
    let mut content = raw_content(scratch, &config.path);
    let mut rig = Rig::open(config);
    let size = content.len() as u64;
    for step in 0..steps {
        // Several at once, each in a part of the disk of its own.
        let lanes = [1, 1, 4, 8][chance.bits() as usize % 4];
        let span = size / lanes / 512 * 512;
        let mut memory: Vec<Mapping> = (0..lanes).map(|_| Mapping::new(1 << 20).unwrap()).collect();
        let mut requests = Vec::new();
        let mut plans = Vec::new();
        for lane in 0..lanes {
            let len_max = [512, 4096, 65536, 1 << 20][chance.bits() as usize % 4].min(span);
            let unit = if chance.bits().is_multiple_of(3) {
                512
            } else {
                4096.min(len_max)
            };
            let len = (chance.bits() % (len_max / unit) + 1) * unit;
            let offset = lane * span + chance.bits() % ((span - len) / unit + 1) * unit;
            let op = [
                Op::Read,
                Op::Write,
                Op::Write,
                Op::Read,
                Op::WriteZeroes,
                Op::Discard,
            ][chance.bits() as usize % 6];
            let mut flags = if chance.bits().is_multiple_of(8) {
                Flags::FUA
            } else {
                Flags::NONE
            };
            if op == Op::WriteZeroes && chance.bits().is_multiple_of(2) {
                flags = flags.with(Flags::NO_UNMAP);
            }
            let bytes = &mut memory[lane as usize].bytes_mut()[..len as usize];
            let fill = (chance.bits() % 255) as u8 + 1;
            bytes
                .iter_mut()
                .enumerate()
                .for_each(|(at, byte)| *byte = fill ^ (at / 512) as u8);
            requests.push(match op {
                Op::Read => request_with(op, Flags::NONE, 0, offset, &[lend(bytes)]),
                Op::Write => request_with(op, flags, 0, offset, &[lend(bytes)]),
                _ => flagged(
                    op,
                    if op == Op::Discard { Flags::NONE } else { flags },
                    offset,
                    len,
                ),
            });
            plans.push((op, offset as usize..(offset + len) as usize));
        }
        let status = rig.run_all(&requests);
        for (lane, (op, range)) in plans.into_iter().enumerate() {
            let what = format!("seed {seed}, step {step}: {op:?} {range:?} of {:?}", config.path);
            assert_eq!(status[lane], Status::Ok, "{what}");
            let bytes = &memory[lane].bytes_mut()[..range.len()];
            match op {
                Op::Read => assert!(*bytes == content[range.clone()], "{what}"),
                Op::Write => content[range].copy_from_slice(bytes),
                Op::WriteZeroes => content[range].fill(0),
                _ => {
                    let found = rig.read(range.start as u64, range.len());
                    let old = &content[range.clone()];
                    assert!(
                        found.iter().zip(old).all(|(new, old)| *new == 0 || new == old),
                        "{what}"
                    );
                    content[range].copy_from_slice(&found);
                }
            }
        }
        if chance.bits().is_multiple_of(32) {
            rig.flush();
        }
    }
    rig.flush();
    let mut extents = Vec::new();
    rig.device
        .extents(DiskId(0), 0, size, 4096, &mut extents)
        .unwrap();
    let mut at = 0;
    for extent in extents {
        let range = at..at + extent.len as usize;
        assert!(
            !extent.zero || content[range].iter().all(|byte| *byte == 0),
            "seed {seed}: zeroes at {at}"
        );
        at += extent.len as usize;
    }
    drop(rig);
    let found = raw_content(scratch, &config.path);
    let differs = found
        .iter()
        .zip(&content)
        .position(|(found, wanted)| found != wanted);
    assert_eq!(
        differs, None,
        "seed {seed}: QEMU reads otherwise: {:?}",
        config.path
    );
    check(scratch, &config.path);
    // Once more by a driver that knows nothing yet.
    let mut again = Rig::open(config);
    for start in (0..content.len()).step_by(1 << 20) {
        let len = (1 << 20).min(content.len() - start);
        assert!(
            again.read(start as u64, len) == content[start..start + len],
            "seed {seed}: {start}"
        );
    }
}

fn repetitions() -> u32 {
    std::env::var("BLKMQ_STEPS").map_or(1, |steps| steps.parse().expect("a number"))
}

/// What QEMU reads of an image.
fn raw_content(scratch: &Scratch, path: &Path) -> Vec<u8> {
    qemu(
        scratch,
        "qemu-img",
        &format!("convert -U -f qcow2 -O raw {} raw.copy", path.display()),
    );
    std::fs::read(scratch.path("raw.copy")).unwrap()
}

fn check(scratch: &Scratch, path: &Path) {
    let text = qemu(scratch, "qemu-img", &format!("check -f qcow2 {}", path.display()));
    assert!(
        text.as_deref().unwrap_or("").contains("No errors were found"),
        "{text:?}"
    );
}

/// Images of all shapes, on nothing.
#[test]
fn images_of_all_shapes_are_read_and_written_as_qemu_does() {
    let scratch = Scratch::new("shapes");
    let shapes = [
        ("v2", "compat=0.10", "8M"),
        ("v3", "compat=1.1", "8M"),
        ("tiny", "cluster_size=512", "2M"),
        ("small", "cluster_size=4096", "8M"),
        ("large", "cluster_size=2M", "16M"),
        ("lazy", "lazy_refcounts=on", "8M"),
        ("bits1", "refcount_bits=1,cluster_size=4096", "4M"),
        ("bits64", "refcount_bits=64", "8M"),
        ("full", "preallocation=full", "8M"),
        ("tables", "preallocation=metadata,cluster_size=16384", "8M"),
        ("ragged", "cluster_size=65536", "8389120"),
        ("subclusters", "extended_l2=on,cluster_size=128k", "8M"),
        ("finest", "extended_l2=on,cluster_size=16k", "4M"),
    ];
    for (seed, (name, options, size)) in (1..).zip(shapes) {
        let path = scratch.path(name);
        let words = format!("create -q -f qcow2 -o {options} {} {size}", path.display());
        if qemu(&scratch, "qemu-img", &words).is_none() {
            return;
        }
        for direct in [Direct::Auto, Direct::Off] {
            exercise(
                &scratch,
                &Qcow2Config {
                    direct,
                    ..config(&path)
                },
                seed,
                20,
            );
        }
    }
}

/// Images on bases: raw, compressed, shorter, of other clusters, and chains of them.
#[test]
fn images_on_bases_of_all_shapes_are_read_and_written_as_qemu_does() {
    let scratch = Scratch::new("bases");
    let noise: Vec<u8> = (0..6 << 20).map(|at: u32| ((at / 700) ^ at) as u8).collect();
    std::fs::write(scratch.path("raw"), &noise[..5_000_192]).unwrap();
    std::fs::write(scratch.path("short"), &noise[..1_000_000]).unwrap();
    let made = [
        "create -q -f qcow2 -b raw -F raw top1 8M",
        "create -q -f qcow2 -b short -F raw -o compat=0.10 top2 8M",
        "convert -c -f raw -O qcow2 raw compressed",
        "create -q -f qcow2 -b compressed -F qcow2 top3 8M",
        "convert -f raw -O qcow2 -o cluster_size=4096 raw fine",
        "create -q -f qcow2 -b fine -F qcow2 top4 8M",
        "create -q -f qcow2 -b top3 -F qcow2 -o cluster_size=2M top5 8M",
        "create -q -f qcow2 -b top5 -F qcow2 -o cluster_size=512 top6 4M",
        "create -q -f qcow2 -o data_file=data,data_file_raw=off top7 8M",
        "create -q -f qcow2 -b top7 -F qcow2 top8 8M",
        "create -q -f qcow2 -b raw -F raw -o extended_l2=on,cluster_size=128k top9 8M",
        "create -q -f qcow2 -b top9 -F qcow2 top10 8M",
        "convert -c -f raw -O qcow2 -o extended_l2=on raw packed",
        "convert -c -f raw -O qcow2 -o compression_type=zstd raw zstd",
        "create -q -f qcow2 -b zstd -F qcow2 top11 8M",
    ];
    for words in made {
        if qemu(&scratch, "qemu-img", words).is_none() {
            return;
        }
    }
    for (seed, (name, base)) in (100..).zip([
        ("top1", "raw"),
        ("top2", "short"),
        ("top3", "compressed"),
        ("compressed", "raw"),
        ("top4", "fine"),
        ("top5", "top3"),
        ("top6", "top5"),
        ("top7", "raw"),
        ("top8", "top7"),
        ("top9", "raw"),
        ("top10", "top9"),
        ("top11", "zstd"),
    ]) {
        if name == "compressed" {
            continue;
        }
        let before = std::fs::read(scratch.path(base)).unwrap();
        for base_cache in [BaseCache::Page, BaseCache::Direct] {
            // A map that is too small for the disk, too.
            let config = Qcow2Config {
                base_cache,
                map_cache: 16 << 10,
                ..config(&scratch.path(name))
            };
            exercise(&scratch, &config, seed, 15);
        }
        assert!(
            std::fs::read(scratch.path(base)).unwrap() == before,
            "{base} was changed"
        );
    }
    // Compressed clusters of the image itself are replaced.
    exercise(&scratch, &config(&scratch.path("compressed")), 200, 30);
    exercise(&scratch, &config(&scratch.path("packed")), 201, 30);
    exercise(&scratch, &config(&scratch.path("zstd")), 202, 30);
}

#[test]
fn snapshots_inside_an_image_are_kept() {
    let scratch = Scratch::new("inside");
    for options in ["extended_l2=off", "extended_l2=on"] {
        keeps_snapshots_inside(&scratch, options);
    }
}

fn keeps_snapshots_inside(scratch: &Scratch, options: &str) {
    let path = scratch.path("image");
    let words = format!("create -q -f qcow2 -o {options} image 8M");
    if qemu(scratch, "qemu-img", &words).is_none() {
        return;
    }
    let mut rig = Rig::at(&path);
    for at in 0..8 {
        assert_eq!(rig.write(Flags::NONE, at << 20, &[7; 1 << 20]), Status::Ok);
    }
    rig.flush();
    drop(rig);
    qemu(scratch, "qemu-img", "snapshot -c before image");
    exercise(scratch, &config(&path), 300, 30);
    qemu(scratch, "qemu-img", "snapshot -a before image");
    check(scratch, &path);
    assert!(raw_content(scratch, &path).iter().all(|byte| *byte == 7));
}

#[test]
fn discarded_clusters_give_their_space_back() {
    let scratch = Scratch::new("space");
    if !created(&scratch, "image 64M") {
        return;
    }
    let path = scratch.path("image");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap()) * 512;
    let mut rig = Rig::at(&path);
    for at in 0..32 {
        assert_eq!(rig.write(Flags::NONE, at << 20, &[7; 1 << 20]), Status::Ok);
    }
    rig.flush();
    let full = blocks();
    assert_eq!(rig.run(request(Op::Discard, 0, 32 << 20)), Status::Ok);
    rig.flush();
    assert!(full > 32 << 20 && blocks() < 2 << 20, "{full} {}", blocks());
    assert!(rig.read(0, 1 << 20).iter().all(|byte| *byte == 0));
    drop(rig);
    check(&scratch, &path);
}

#[test]
fn image_grows_while_it_is_served() {
    let scratch = Scratch::new("grows");
    if !created(&scratch, "-o cluster_size=4096 image 1M") {
        return;
    }
    let path = scratch.path("image");
    let mut rig = Rig::at(&path);
    assert_eq!(rig.write(Flags::NONE, (1 << 20) - 4096, &[7; 4096]), Status::Ok);
    assert_eq!(rig.device.resize(DiskId(0), Some(1 << 30)).unwrap(), 1 << 30);
    assert_eq!(rig.write(Flags::NONE, (1 << 30) - 4096, &[8; 4096]), Status::Ok);
    rig.flush();
    assert_eq!(rig.read((1 << 20) - 4096, 4096), [7; 4096]);
    drop(rig);
    check(&scratch, &path);
    let again = ImageDisk::open(&config(&path)).unwrap();
    assert_eq!(again.image.size(), 1 << 30);
}

const DEPTH: u32 = 32;

/// Images with bytes of their header and tables changed by chance: they are refused, or cost their own requests an error.
#[test]
fn hostile_images_are_refused_or_cost_their_own_requests_an_error() {
    let scratch = Scratch::new("hostile");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    let made = [
        "create -q -f qcow2 -o cluster_size=512 tiny 256K",
        "create -q -f qcow2 -b base -F raw -o cluster_size=4096 small 1M",
        "convert -c -f raw -O qcow2 base packed",
        "convert -c -f raw -O qcow2 -o compression_type=zstd base zstd",
        "create -q -f qcow2 -b base -F raw -o extended_l2=on,cluster_size=16k subclusters 1M",
    ];
    for words in made {
        if qemu(&scratch, "qemu-img", words).is_none() {
            return;
        }
    }
    let steps = std::env::var("BLKMQ_STEPS").map_or(1, |steps| steps.parse().expect("a number"));
    let mut accepted = 0;
    for (seed, name) in (0..200 * steps).zip(
        ["tiny", "small", "packed", "zstd", "subclusters"]
            .into_iter()
            .cycle(),
    ) {
        let mut chance = Chance::new(seed, 1);
        let mut bytes = std::fs::read(scratch.path(name)).unwrap();
        let changes = chance.bits() % 6 + 1;
        for _ in 0..changes {
            let at = match chance.bits() % 4 {
                0 => chance.bits() % 112,
                1 => chance.bits() % 4096,
                _ => chance.bits() % bytes.len() as u64,
            } as usize;
            let at = at.min(bytes.len() - 8) / 8 * 8;
            let value = match chance.bits() % 5 {
                0 => chance.bits().to_be_bytes(),
                1 => ((1u64 << 63) | (chance.bits() % 64 * 512)).to_be_bytes(),
                2 => (chance.bits() % 64 * 4096).to_be_bytes(),
                3 => u64::MAX.to_be_bytes(),
                _ => ((3u64 << 62) | (chance.bits() % (1 << 20))).to_be_bytes(),
            };
            bytes[at..at + 8].copy_from_slice(&value);
        }
        let path = scratch.path("hostile");
        std::fs::write(&path, &bytes).unwrap();
        let Ok(disk) = ImageDisk::open(&config(&path)) else {
            continue;
        };
        accepted += 1;
        let size = disk.size();
        let mut rig = Rig::of(disk);
        let mut memory = Mapping::new(64 << 10).unwrap();
        for _ in 0..12 {
            let len = (chance.bits() % 16 + 1) * 512;
            let offset = chance.bits() % (size.saturating_sub(len) / 512 + 1) * 512;
            let lent = lend(&mut memory.bytes_mut()[..len as usize]);
            let rq = match chance.bits() % 6 {
                0 | 1 => request_with(Op::Read, Flags::NONE, 0, offset, &[lent]),
                2 | 3 => request_with(Op::Write, Flags::NONE, 0, offset, &[lent]),
                4 => request(Op::WriteZeroes, offset, len),
                _ => request(Op::Flush, 0, 0),
            };
            // Whatever comes of it, it ends.
            let _ = rig.run(rq);
        }
        let mut extents = Vec::new();
        let _ = rig.device.extents(DiskId(0), 0, u64::MAX, 64, &mut extents);
    }
    assert!(accepted > 20, "only {accepted} were opened: no test");
}

/// A copy of an image that is written is what a kill of its daemon leaves: what was flushed is there, and QEMU finds
/// nothing but lost clusters.
#[test]
fn image_of_any_moment_has_no_corruption_without_a_flush() {
    let scratch = Scratch::new("moment");
    std::fs::write(scratch.path("base"), vec![3; 1 << 20]).unwrap();
    for (seed, options) in (0..).zip([
        "-o cluster_size=512 image 2M",
        "-o cluster_size=4096 -b base -F raw image 64M",
        "-o cluster_size=65536,refcount_bits=1 image 4G",
        "-o cluster_size=512,refcount_bits=64,compat=1.1 image 8M",
        "-o compat=0.10,cluster_size=1024 image 8M",
    ]) {
        if !created(&scratch, options) {
            return;
        }
        for direct in [Direct::Auto, Direct::Off] {
            let mut chance = Chance::new(seed, 3);
            let config = Qcow2Config {
                direct,
                ..config(&scratch.path("image"))
            };
            let mut rig = Rig::open(&config);
            let size = rig.device.resize(DiskId(0), None).unwrap();
            for step in 0..40 {
                let (len, unit) = ((chance.bits() % 32 + 1) * 512, 512);
                let offset = chance.bits() % ((size - len) / unit + 1) * unit;
                let status = match chance.bits() % 8 {
                    0 => rig.run(request(Op::Discard, offset, len)),
                    1 => rig.run(request(Op::WriteZeroes, offset, len)),
                    2 if step % 4 == 0 => rig.run(request(Op::Flush, 0, 0)),
                    _ => rig.write(Flags::NONE, offset, &vec![9; len as usize]),
                };
                assert_eq!(status, Status::Ok);
                std::fs::copy(scratch.path("image"), scratch.path("moment")).unwrap();
                is_not_corrupt(&scratch, &format!("{options}, {direct:?}, step {step}"));
            }
            if size < 1 << 30 {
                rig.device.resize(DiskId(0), Some(size * 16)).unwrap();
                std::fs::copy(scratch.path("image"), scratch.path("moment")).unwrap();
                is_not_corrupt(&scratch, options);
            }
        }
    }
}

fn is_not_corrupt(scratch: &Scratch, what: &str) {
    let words = ["check", "-f", "qcow2", "moment"];
    let output = Command::new("qemu-img")
        .args(words)
        .current_dir(&scratch.0)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    // 3: there are leaked clusters, and nothing else.
    assert!(
        matches!(output.status.code(), Some(0 | 3)) && !said.contains("ERROR"),
        "{what}: {said}"
    );
}

/// While the tables are being written, a flush of the data alone does not make a new cluster durable.
#[test]
fn image_is_not_clean_before_a_flush_of_its_tables_has_ended() {
    let scratch = Scratch::new("clean");
    if !created(&scratch, "image 1M") {
        return;
    }
    let disk = ImageDisk::open(&config(&scratch.path("image"))).unwrap();
    assert!(disk.image.is_clean());
    disk.write(0, &[1; 4096]).unwrap();
    assert!(!disk.image.is_clean());
    std::thread::scope(|scope| {
        let go_on = disk.image.files()[0].hold_syncs();
        let flush = scope.spawn(|| disk.flush());
        std::thread::sleep(std::time::Duration::from_millis(100));
        let was_clean = disk.image.is_clean();
        go_on();
        flush.join().unwrap().unwrap();
        assert!(!was_clean, "clean while the flush is under way");
    });
    assert!(disk.image.is_clean());
}
