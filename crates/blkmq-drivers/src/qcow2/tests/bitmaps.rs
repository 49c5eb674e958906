//! Tests of images with dirty bitmaps of QEMU's: who writes to one without keeping them says so, or a backup would leave out
//! what was written.

use blkmq_host::device::GivenUp;

use super::replaced::replace;
use super::*;

/// Makes an image of 4 MiB whose first MiB is there, with a bitmap.
fn image(scratch: &Scratch) -> bool {
    let made = created(scratch, "image 4M");
    if made {
        let mut rig = Rig::at(&scratch.path("image"));
        assert_eq!(rig.write(Flags::NONE, 0, &[3; 1 << 20]), Status::Ok);
        rig.flush();
        drop(rig);
        qemu(scratch, "qemu-img", "bitmap --add -f qcow2 image changed").unwrap();
        assert!(has_bitmap(scratch, "image"));
    }
    made
}

/// Returns whether QEMU finds the bitmap, and so trusts it, in the file as it is now.
fn has_bitmap(scratch: &Scratch, name: &str) -> bool {
    std::fs::copy(scratch.path(name), scratch.path("copy")).unwrap();
    let info = qemu(scratch, "qemu-img", "info -f qcow2 copy").unwrap();
    info.contains("name: changed")
}

#[test]
fn bitmap_is_given_up_before_a_change_of_any_kind_is_in_the_image() {
    let scratch = Scratch::new("bitmap");
    type Change = fn(&mut Rig) -> Status;
    let changes: [(&str, Change); 5] = [
        ("in place", |rig| rig.write(Flags::NONE, 0, &[7; 4096])),
        ("part of a sector's block", |rig| {
            rig.write(Flags::NONE, 512, &[7; 512])
        }),
        ("new cluster", |rig| rig.write(Flags::NONE, 2 << 20, &[7; 65536])),
        ("zeroing", |rig| {
            rig.run(flagged(Op::WriteZeroes, Flags::NONE, 65536, 65536))
        }),
        ("discard", |rig| {
            rig.run(flagged(Op::Discard, Flags::NONE, 65536, 65536))
        }),
    ];
    for (what, change) in changes {
        if !image(&scratch) {
            return;
        }
        let mut rig = Rig::at(&scratch.path("image"));
        assert!(has_bitmap(&scratch, "image"), "{what}: nothing was changed yet");
        assert_eq!(change(&mut rig), Status::Ok);
        // Without a flush: what a kill leaves.
        assert!(!has_bitmap(&scratch, "image"), "{what}");
        rig.flush();
        drop(rig);
        assert!(!has_bitmap(&scratch, "image"), "{what}: afterwards");
        // Its clusters are lost, and nothing worse.
        qemu(&scratch, "qemu-img", "check -q -r leaks -f qcow2 image");
        check(&scratch, &scratch.path("image"));
        std::fs::remove_file(scratch.path("image")).unwrap();
    }
}

#[test]
fn bitmap_of_an_image_that_is_only_read_is_kept() {
    let scratch = Scratch::new("bitmap-read");
    if !image(&scratch) {
        return;
    }
    let config = Qcow2Config {
        read_only: true,
        ..config(&scratch.path("image"))
    };
    let mut rig = Rig::open(&config);
    rig.read(0, 4 << 20);
    drop(rig);
    let words = "create -q -f qcow2 -b image -F qcow2 above 4M";
    qemu(&scratch, "qemu-img", words).unwrap();
    let mut rig = Rig::at(&scratch.path("above"));
    assert_eq!(rig.write(Flags::NONE, 0, &[7; 512]), Status::Ok);
    rig.flush();
    assert!(has_bitmap(&scratch, "image"), "it is a base");
    // Until another image is committed into it.
    replace(&mut rig, Replacement::BeginCommit).unwrap();
    assert_eq!(rig.run(flagged(Op::Read, Flags::TASK, 0, 65536)), Status::Ok);
    assert!(!has_bitmap(&scratch, "image"), "it was written");
    replace(&mut rig, Replacement::SettleCommit(GivenUp::default())).unwrap();
    replace(&mut rig, Replacement::Commit).unwrap();
    drop(rig);
    assert!(!has_bitmap(&scratch, "image"), "it has what was written above it");
}
