//! Tests of new images, as QEMU finds them.

use super::super::create::NewImage;
use super::*;

/// The tables of the larger disks do not fit into the clusters that an image begins with.
#[test]
fn new_images_of_all_shapes_are_sound_to_their_last_byte() {
    for (cluster, size) in [
        (512, 1 << 20),
        (512, 64 << 20),
        (16 << 10, 64 << 30),
        (64 << 10, 1536),
        (2 << 20, 8 << 40),
    ] {
        for has_subclusters in [false, true] {
            let scratch = Scratch::new("created");
            let path = scratch.path("image");
            let new = NewImage {
                path: path.clone(),
                size: Some(size),
                cluster: Some(cluster),
                has_subclusters,
                base: None,
            };
            if has_subclusters && cluster == 512 {
                let refused = new.create().unwrap_err().to_string();
                assert!(refused.contains("at least 16 KiB"), "{refused}");
                assert!(!path.exists());
                continue;
            }
            assert_eq!(new.create().unwrap(), size);
            let what = format!("{size} bytes in clusters of {cluster}, {has_subclusters}");
            let mut rig = Rig::at(&path);
            assert_eq!(
                rig.write(Flags::NONE, size - 512, &[7; 512]),
                Status::Ok,
                "{what}"
            );
            rig.flush();
            drop(rig);
            let Some(info) = qemu(&scratch, "qemu-img", "info --output=json image") else {
                return;
            };
            let has = |text: &str| assert!(info.contains(text), "{what}: {info}");
            has(&format!("\"virtual-size\": {size}"));
            has(&format!("\"cluster-size\": {cluster}"));
            has(&format!("\"extended-l2\": {has_subclusters}"));
            check(&scratch, &path);
            let words = format!(
                "dd -f qcow2 -O raw bs=512 skip={} if=image of=last",
                size / 512 - 1
            );
            qemu(&scratch, "qemu-img", &words).unwrap();
            assert!(std::fs::read(scratch.path("last")).unwrap() == [7; 512], "{what}");
        }
    }
}
