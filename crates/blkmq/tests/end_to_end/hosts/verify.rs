//! fio's verification of small and large requests at any sector, where direct I/O needs 4096 bytes. `BLKMQ_VERIFY_MIB=256`
//! has each client write so much, instead of a little.

use super::place::{Place, word};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

#[test]
fn fio_finds_what_it_wrote_at_any_sector_of_ext4_on_large_sectors() {
    verify("ext4 on sectors of 4096");
}

#[test]
fn fio_finds_what_it_wrote_at_any_sector_of_xfs_on_large_sectors() {
    verify("XFS on sectors of 4096");
}

fn verify(row: &str) {
    if !installed(&["fio"]) {
        return;
    }
    let bytes = mib_of_a_client() << 20;
    let scratch = Scratch::new();
    // Each client begins one sector behind the end of the one before, so neighbours share a block.
    let stride = bytes + 512;
    let content = vec![0; (4 * stride).next_multiple_of(4096) as usize];
    let Some(place) = Place::new(row, &scratch, &content) else {
        return;
    };
    let disk = format!("name=vm1,file={},direct=on", word(&place.image));
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let uri = format!("--uri={}", daemon.uri("vm1"));
    for clients in [1, 4] {
        let words = [
            "--name=verify".to_owned(),
            "--ioengine=nbd".to_owned(),
            uri.clone(),
            format!("--numjobs={clients}"),
            "--rw=randwrite".to_owned(),
            "--bsrange=512-1m".to_owned(),
            "--blockalign=512".to_owned(),
            format!("--size={bytes}"),
            format!("--offset_increment={stride}"),
            "--iodepth=16".to_owned(),
            "--fsync=64".to_owned(),
            "--verify=crc32c".to_owned(),
            "--verify_fatal=1".to_owned(),
            "--verify_state_save=0".to_owned(),
        ];
        run("fio", &words.each_ref().map(String::as_str));
    }
    daemon.stop();
}

fn mib_of_a_client() -> u64 {
    match std::env::var("BLKMQ_VERIFY_MIB") {
        Ok(number) => number.parse().expect("BLKMQ_VERIFY_MIB is a number"),
        Err(_) => 8,
    }
}
