//! Tests that a daemon without work uses no CPU time.

use std::time::{Duration, Instant};

use crate::common::nbd::Client;
use crate::common::{Daemon, Scratch};
use blkmq_testkit::vhost_user::FrontEnd as Driver;

#[test]
fn hundred_idle_disks_cost_at_most_a_thousandth_of_a_core() {
    let scratch = Scratch::new();
    let disks: Vec<String> = (0..100).map(|number| format!("name=vm{number},ram=1M")).collect();
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let vhost_user = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut words = vec!["--nbd", &nbd, "--vhost-user", &vhost_user];
    words.extend(disks.iter().flat_map(|disk| ["--disk", disk]));
    let daemon = Daemon::start(&words);
    let socket = scratch.path("nbd.sock");
    // Some clients that are connected, have done I/O, and are now idle.
    let mut clients: Vec<Client> = (0..20)
        .map(|number| Client::connect(&socket, &format!("vm{number}")).expect("the daemon serves it"))
        .collect();
    for client in &mut clients {
        client.write(0, &[1; 4096]).expect("a write");
    }
    // And drivers of virtual machines, with a virtqueue each.
    let drivers: Vec<Driver> = (0..20)
        .map(|number| Driver::connect(&scratch.path(&format!("vm{number}.sock"))))
        .collect();
    for driver in &drivers {
        driver.start();
        driver.request(0, 0, 0);
        driver.offer(&[0]);
        assert_eq!(driver.used(1), [0]);
    }
    // First let the after-effects of a burst (polling for a while) pass.
    std::thread::sleep(Duration::from_secs(1));
    let (start, before) = (Instant::now(), daemon.cpu_ns());
    std::thread::sleep(IDLE_TIME);
    let used = daemon.cpu_ns() - before;
    let share = used as f64 / start.elapsed().as_nanos() as f64;
    assert!(
        share <= 0.001,
        "idle, the daemon used {:.3} % of a core",
        share * 100.0
    );
    daemon.stop();
}

/// Long enough to detect a periodic wake-up.
const IDLE_TIME: Duration = Duration::from_secs(8);
