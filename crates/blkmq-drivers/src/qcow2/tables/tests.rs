//! Tests of the tables of an image: clusters are counted before anything points to them, and free when nothing does.

use super::super::create::NewImage;
use super::*;
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig};

/// A new image of 64 MiB in a file of a test's own, with clusters of 4 KiB.
struct Scratch {
    path: std::path::PathBuf,
    disk: Arc<FileDisk>,
}

impl Scratch {
    fn new(name: &str, cluster: u32, size: u64) -> Self {
        let path = std::env::temp_dir().join(format!("blkmq-tables-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let new = NewImage {
            path: path.clone(),
            size: Some(size),
            cluster: Some(cluster),
            has_subclusters: false,
            base: None,
        };
        new.create().unwrap();
        let config = FileConfig {
            path: path.clone(),
            direct: Direct::Off,
            ..FileConfig::default()
        };
        let disk = Arc::new(FileDisk::open_part(Purpose::Serve, &config).unwrap());
        Self { path, disk }
    }

    fn open(&self) -> Tables {
        let header = super::super::chain::read_header(&self.disk).unwrap();
        Tables::open(&self.disk, None, &header).unwrap()
    }

    /// What is wrong with the image, and what is lost, as the drive has it.
    fn survey(&self) -> (u64, u64) {
        let found = super::super::survey::count(&self.disk).unwrap();
        (found.errors, found.leaks)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Allocates what a write would, without the data. Returns where it is.
fn allocate(tables: &Tables, at: u64, len: u64) -> u64 {
    let mut host = None;
    let mut done = 0;
    while done < len {
        done += match tables.prepare(at + done, len - done).unwrap() {
            Prepared::There { host: there, len } => {
                host.get_or_insert(there);
                len
            }
            Prepared::New(new) => {
                host.get_or_insert(new.host());
                let range = new.range();
                tables
                    .space
                    .reach(new.host() + (range.end - range.start))
                    .unwrap();
                new.commit().unwrap();
                range.end - at - done
            }
        };
    }
    host.unwrap()
}

#[test]
fn clusters_are_lost_at_most_before_a_flush_and_right_after_it() {
    let scratch = Scratch::new("flush", 4096, 64 << 20);
    let tables = scratch.open();
    for number in 0..200 {
        allocate(&tables, number * 37 % 16000 * 4096, 8192);
        assert_eq!(scratch.survey().0, 0);
    }
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
    assert!(!tables.is_dirty());
    let again = scratch.open();
    for number in 0..200 {
        let at = number * 37 % 16000 * 4096;
        assert_eq!(
            again.look_up(at, 4096).unwrap(),
            tables.look_up(at, 4096).unwrap()
        );
    }
}

#[test]
fn freed_clusters_are_given_to_others_after_a_flush_alone() {
    let scratch = Scratch::new("freed", 4096, 64 << 20);
    let tables = scratch.open();
    let host = allocate(&tables, 0, 1 << 20);
    tables.flush().unwrap();
    tables.mark(0, 1 << 20, Marked::Zero).unwrap();
    let other = allocate(&tables, 32 << 20, 1 << 20);
    assert!(other >= host + (1 << 20), "{other:#x} was another's at {host:#x}");
    tables.flush().unwrap();
    assert_eq!(allocate(&tables, 33 << 20, 1 << 20), host);
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
}

#[test]
fn clusters_that_were_prepared_in_vain_are_free_again() {
    let scratch = Scratch::new("vain", 4096, 64 << 20);
    let tables = scratch.open();
    let Prepared::New(new) = tables.prepare(0, 1 << 20).unwrap() else {
        panic!("nothing was there");
    };
    let host = new.host();
    tables.flush().unwrap();
    assert_eq!(scratch.survey().0, 0);
    drop(new);
    assert_eq!(tables.look_up(0, 4096).unwrap().0, Place::Below);
    assert_eq!(allocate(&tables, 1 << 20, 4096), host);
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
}

/// A flush that has failed is made good by the next one alone, which writes all of it again.
#[test]
fn tables_that_a_failed_flush_took_are_written_by_the_next_one() {
    let scratch = Scratch::new("failed", 4096, 64 << 20);
    let tables = scratch.open();
    allocate(&tables, 0, 1 << 20);
    scratch.disk.fail_syncs(true);
    for _ in 0..2 {
        assert!(tables.flush().is_err(), "nothing was written again");
        assert!(tables.is_dirty());
    }
    // As a power cut leaves it: nothing of it is there.
    let before = scratch.open();
    assert_eq!(before.look_up(0, 4096).unwrap().0, Place::Below);
    scratch.disk.fail_syncs(false);
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
    assert_ne!(scratch.open().look_up(0, 4096).unwrap().0, Place::Below);
}

#[test]
fn refcount_table_and_l1_table_grow() {
    let scratch = Scratch::new("grow", 512, 1 << 20);
    let tables = scratch.open();
    tables.grow(1 << 30).unwrap();
    tables.flush().unwrap();
    tables
        .write_header(super::super::header::SIZE_FIELD, &(1u64 << 30).to_be_bytes())
        .unwrap();
    assert_eq!(scratch.survey(), (0, 0));
    // One block of refcounts has 128 KiB, and one cluster of the table 64 of them.
    for number in 0..40 {
        allocate(&tables, number * (20 << 20), 1 << 20);
        assert_eq!(scratch.survey().0, 0, "{number}");
    }
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
}

#[test]
fn one_of_two_writers_of_a_new_cluster_waits_for_the_other() {
    let scratch = Scratch::new("both", 65536, 64 << 20);
    let tables = scratch.open();
    let Prepared::New(new) = tables.prepare(0, 4096).unwrap() else {
        panic!("nothing was there");
    };
    let host = new.host();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| match tables.prepare(4096, 4096).unwrap() {
            Prepared::There { host, .. } => host,
            Prepared::New(_) => panic!("it is there by then"),
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!other.is_finished());
        new.commit().unwrap();
        assert_eq!(other.join().unwrap(), host + 4096);
    });
}

#[test]
fn claim_that_lands_while_the_tables_are_held_is_entered_by_their_next_holder() {
    let scratch = Scratch::new("claim", 65536, 64 << 20);
    let tables = scratch.open();
    // Nothing of it is in memory, so it is for a thread.
    assert!(tables.claim(0..1).is_none());
    let host = allocate(&tables, 0, 4096);
    assert!(tables.claim(0..1).is_none(), "it is there already");
    tables.flush().unwrap();
    let claim = tables.claim(2..4).unwrap();
    assert_eq!(claim.host, host + 65536);
    assert!(tables.claim(3..5).is_none(), "a part of it is another's");
    let place = |at| tables.look_up(at, 4096).unwrap().0;
    assert_eq!(place(2 << 16), Place::Below);
    let held = tables.lock();
    assert!(tables.claim(8..9).is_none(), "it would have to wait");
    tables.land(claim, true);
    assert!(tables.is_dirty());
    drop(held);
    let found = |host| Place::Data { host, is_own: true };
    assert_eq!(place(3 << 16), found(host + (2 << 16)));
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
    assert_eq!(
        scratch.open().look_up(2 << 16, 4096).unwrap().0,
        found(host + 65536)
    );
}

#[test]
fn claim_that_is_given_up_leaves_its_clusters_to_others() {
    let scratch = Scratch::new("given-up", 65536, 64 << 20);
    let tables = scratch.open();
    allocate(&tables, 0, 4096);
    let claim = tables.claim(2..4).unwrap();
    let host = claim.host;
    tables.flush().unwrap();
    assert_eq!(
        scratch.survey(),
        (0, 2),
        "they are counted, and nothing points to them"
    );
    tables.land(claim, false);
    assert_eq!(allocate(&tables, 4 << 16, 2 << 16), host);
    tables.flush().unwrap();
    assert_eq!(scratch.survey(), (0, 0));
}

#[test]
fn writer_waits_for_a_claim_that_lands_while_it_has_the_tables() {
    let scratch = Scratch::new("lands", 65536, 64 << 20);
    let tables = scratch.open();
    allocate(&tables, 0, 4096);
    for round in 0..200u64 {
        let cluster = 2 + round * 2;
        let Some(claim) = tables.claim(cluster..cluster + 1) else {
            panic!("nobody has the tables");
        };
        let host = claim.host;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| match tables.prepare(cluster << 16, 4096).unwrap() {
                Prepared::There { host, .. } => host,
                Prepared::New(_) => panic!("it is there by then"),
            });
            tables.land(claim, true);
            assert_eq!(other.join().unwrap(), host);
        });
    }
}
