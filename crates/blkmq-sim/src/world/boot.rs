//! Decides how the parts of a history are made from its setup: the stage, the clients, the queue and its reactors.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blkmq_core::driver::HctxDriver;
use blkmq_core::group::GroupTree;
use blkmq_core::ids::{GroupId, HctxId, ReactorId};
use blkmq_core::queue::{DiskConfig, QueueConfig, QueueHandle, ReactorConfig, TagMode};
use blkmq_core::stat::StatsMode;
use blkmq_core::time::Instant;

use crate::drive::Drive;
use crate::drive::modelled_hctx::{ModelledHctx, Way};
use crate::history::History;
use crate::oracle::{Oracle, Rules};
use crate::paths::{PATHS_MAX, Paths};
use crate::reactor::Reactor;
use crate::rng::Rng;
use crate::setup::Setup;
use crate::stage::Stage;
use crate::workload::Client;

pub(super) fn make_stage(setup: &Setup, seed: u64, trace: bool) -> Stage {
    let places = setup.places();
    let block = setup.limits.logical_block;
    let rules = Rules {
        limits: setup.limits.clone(),
        places: places.clone(),
        read_only: setup.read_only.clone(),
        hctxs: setup.hctx_count(),
        depth: setup.depth,
        shared_tags: setup.shared_tags,
        groups_change: setup.control.groups > 0,
    };
    let rng = Rng::new(seed, STREAM_DRIVE);
    let hctxs = setup.hctx_count();
    let paths = setup.paths.clone();
    let paths = paths.map(|spec| Paths::new(spec, hctxs, block, Rng::new(seed, STREAM_PATHS)));
    let ways = if paths.is_some() {
        hctxs * PATHS_MAX as u16
    } else {
        hctxs
    };
    Stage {
        now: Cell::new(Instant(1)),
        drive: RefCell::new(Drive::new(setup.drive.clone(), block, places, ways, rng)),
        oracle: RefCell::new(Oracle::new(rules)),
        history: RefCell::new(History::new(trace)),
        tokens: Cell::new(0),
        work: Cell::default(),
        groups: RefCell::new((0..GROUPS).map(GroupId).collect()),
        paths: paths.map(Rc::new),
        others: RefCell::new(None),
    }
}

pub(super) fn make_client(setup: &Setup, seed: u64, id: usize) -> Client {
    let workload = setup.clients[id % setup.clients.len()].clone();
    let rng = Rng::new(seed, STREAM_CLIENTS + id as u64);
    Client::new(
        workload,
        setup.disk_blocks.clone(),
        setup.limits.logical_block,
        rng,
    )
}

pub(super) fn queue_config(setup: &Setup) -> QueueConfig {
    let block = setup.limits.logical_block;
    let disks = setup.places().into_iter().zip(&setup.read_only).enumerate();
    let disks = disks.map(|(number, (place, &read_only))| DiskConfig {
        name: format!("disk{number}"),
        base: u64::from(place.first) * u64::from(block),
        size: u64::from(place.blocks) * u64::from(block),
        read_only,
        logical_block: block,
    });
    let reactor = |&is_event_loop: &bool| ReactorConfig { is_event_loop };
    QueueConfig {
        reactors: setup.is_event_loop.iter().map(reactor).collect(),
        hctxs: setup.hctx_count(),
        tags: if setup.shared_tags {
            TagMode::Shared(setup.depth)
        } else {
            TagMode::PerHctx(setup.depth)
        },
        requests_per_reactor: setup.requests_per_reactor,
        limits: setup.limits.clone(),
        elevator: setup.elevator,
        dispatch: setup.dispatch,
        timeout: setup.timeout,
        merges: setup.merges,
        groups: GroupTree::flat(GROUPS),
        // Most use what is for use; the other way must come to the same sums.
        stats: if setup.is_event_loop.len().is_multiple_of(3) {
            StatsMode::UnderGate
        } else {
            StatsMode::Outside
        },
        disks: disks.collect(),
        ..QueueConfig::new("sim", setup.is_event_loop.len() as u16)
    }
}

pub(super) fn attach(
    id: usize,
    handle: QueueHandle,
    client: Client,
    depth: u32,
    stage: &Rc<Stage>,
) -> Reactor {
    let hctx = HctxId(id as u16);
    let lower = || match &stage.paths {
        Some(paths) => paths.open(hctx, depth, stage),
        None => Box::new(Way::new(hctx.0, Rc::clone(stage))),
    };
    let modelled_hctx =
        || Box::new(ModelledHctx::new(hctx, lower(), Rc::clone(stage))) as Box<dyn HctxDriver>;
    let driver = handle.owns_hctx().then(modelled_hctx);
    Reactor::new(ReactorId(id as u16), handle.attach(driver), client)
}

/// How many groups there are at first, and at most.
pub(super) const GROUPS: u32 = 8;
const STREAM_DRIVE: u64 = 1;
const STREAM_PATHS: u64 = 5;
const STREAM_CLIENTS: u64 = 1000;
