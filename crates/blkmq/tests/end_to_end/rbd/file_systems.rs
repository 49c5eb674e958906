//! Tests whether file systems on images in a cluster are intact: copied there and back by tools of other
//! projects, and mounted, used and unmounted, compared with what Ceph itself exports.

use super::cluster::Ceph;
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};
use crate::file_systems::{write_ext4_with_qemu, write_xfs_with_nbdcopy};
use crate::fuse::Stage;
use crate::fuse::loops::a_file_system_lives_on;

#[test]
fn ext4_image_is_whole_in_a_cluster_and_when_it_comes_back() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("ext4", "64M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("vm1", image.name, "")]);
    write_ext4_with_qemu(&scratch, &daemon.uri("vm1"));
    daemon.stop();
    if installed(&["e2fsck"]) {
        let exported = scratch.word("exported.raw");
        ceph.export(image.name, &exported);
        run("e2fsck", &["-f", "-n", &exported]);
    }
}

#[test]
fn xfs_image_is_whole_in_a_cluster_and_when_it_comes_back() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image("xfs", "320M");
    let daemon = Daemon::serve(&scratch, &[&ceph.disk("vm1", image.name, "")]);
    write_xfs_with_nbdcopy(&scratch, &daemon.uri("vm1"));
    daemon.stop();
    if installed(&["xfs_repair"]) {
        let exported = scratch.word("exported.raw");
        ceph.export(image.name, &exported);
        run("xfs_repair", &["-n", "-f", &exported]);
    }
}

#[test]
fn ext4_lives_on_an_image_in_a_cluster() {
    lives("live-ext4", &["mkfs.ext4", "-q", "-F"], &["e2fsck", "-f", "-n"]);
}

#[test]
fn xfs_lives_on_an_image_in_a_cluster() {
    lives("live-xfs", &["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n"]);
}

fn lives(name: &'static str, make: &[&str], check: &[&str]) {
    let Some(ceph) = Ceph::find() else { return };
    let image = ceph.image(name, "512M");
    if let Some(stage) = Stage::on(Scratch::new(), &ceph.disk("vm1", image.name, "")) {
        a_file_system_lives_on(stage, make, check);
    }
}
