//! Tests what the daemon must do for real clients: fio, libnbd's tools, QEMU's, nbdkit's, and hostile ones.
//!
//! One program contains all of these tests, so that it is linked once. They run the command itself,
//! over sockets, and sleep in real time; `BLKMQ_BIN` names another build of it (`cargo xtask test`
//! names the release build). A test whose tool is not installed is skipped with a message.

mod common;

mod access;
mod bad_configuration;
mod bench;
mod block_status;
mod checks;
mod connections;
mod containers;
mod control;
mod crash;
mod edges;
mod fairness;
mod fence;
mod file_systems;
mod fio;
mod forgets;
mod front_ends;
mod full_events;
mod fuse;
mod growth;
mod hostile;
mod hosts;
mod hung_changes;
mod hung_groups;
mod idle;
mod isolation;
mod last_sync;
mod late_writes;
mod leaving_guests;
mod libnbd;
mod listening_front_ends;
mod log;
mod luks;
mod manual;
mod mapped;
mod memory;
mod metrics;
mod mixed_sizes;
mod nbd_disk;
mod odd_sizes;
mod pid_namespaces;
mod qcow2;
mod qemu;
mod rbd;
mod readme;
mod sandbox;
mod schedulers;
mod shells;
mod shutdown;
mod sockets;
mod states;
mod successor;
mod tenants;
mod tls;
mod top;
mod trace;
mod ublk;
mod upgrade;
mod vhost_user;
mod watchdog;
