//! Makes the parts of a history from its setup: the stage, the clients, the queue and its reactors.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use blkmq_core::driver::HctxDriver;
use blkmq_core::group::GroupTree;
use blkmq_core::ids::{GroupId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::local::LocalQueue;
use blkmq_core::mapper::stack::Stack;
use blkmq_core::mapper::table::Table;
use blkmq_core::queue::{DiskConfig, Queue, QueueConfig, QueueHandle, ReactorConfig, TagMode};
use blkmq_core::stat::StatsMode;
use blkmq_core::time::Instant;

use crate::drive::modelled_hctx::{ModelledHctx, Way};
use crate::drive::{Drive, Spec};
use crate::history::History;
use crate::mapped;
use crate::oracle::{Oracle, Rules, WireRules};
use crate::paths::{PATHS_MAX, Paths};
use crate::rng::Rng;
use crate::setup::Setup;
use crate::stage::Stage;
use crate::workload::Client;

pub(super) fn make_stage(setup: &Setup, seed: u64, trace: bool) -> Stage {
    let block = setup.block();
    let hctxs = setup.hctx_count();
    let paths = setup.paths.clone();
    let paths = paths.map(|spec| Paths::new(spec, hctxs, block, Rng::new(seed, STREAM_PATHS)));
    let ways = if paths.is_some() {
        hctxs * PATHS_MAX as u16
    } else {
        hctxs
    };
    let make_drive = |(number, (limits, spec)): (usize, (&Limits, &Spec))| {
        let blocks = (block, limits.physical_block);
        let stream = [STREAM_DRIVE, STREAM_MORE_DRIVES + number as u64][number.min(1)];
        let rng = Rng::new(seed, stream);
        RefCell::new(Drive::new(spec.clone(), blocks, setup.places(number), ways, rng))
    };
    Stage {
        now: Cell::new(Instant(1)),
        drives: setup.drives().enumerate().map(make_drive).collect(),
        oracle: RefCell::new(Oracle::new(rules(setup))),
        history: RefCell::new(History::new(trace)),
        tokens: Cell::new(0),
        work: Cell::default(),
        groups: RefCell::new((0..GROUPS).map(GroupId).collect()),
        paths: paths.map(Rc::new),
        others: RefCell::new(None),
    }
}

fn rules(setup: &Setup) -> Rules {
    let wire = |(number, (limits, _)): (usize, (&Limits, _))| WireRules {
        limits: limits.clone(),
        places: setup.places(number),
    };
    Rules {
        block: setup.block(),
        disks: mapped::disk_rules(setup),
        wires: setup.drives().enumerate().map(wire).collect(),
        hctxs: setup.hctx_count(),
        depth: setup.depth,
        shared_tags: setup.shared_tags,
        one_reactor: setup.is_event_loop.len() == 1,
        groups_change: setup.control.groups > 0,
    }
}

pub(super) fn make_client(setup: &Setup, seed: u64, id: usize) -> Client {
    let workload = setup.clients[id % setup.clients.len()].clone();
    let rng = Rng::new(seed, STREAM_CLIENTS + id as u64);
    let Some(mapped) = &setup.mapped else {
        let block = setup.limits.logical_block;
        return Client::new(workload, setup.disk_blocks.clone(), block, rng);
    };
    let block = mapped.block();
    let table = mapped::table(setup, None);
    let blocks = table
        .disks()
        .iter()
        .map(|disk| (disk.size / u64::from(block)) as u32);
    Client::new(workload, blocks.collect(), block, rng)
}

/// Makes the queues and attaches each reactor to all of them. Returns their local queues by
/// reactor.
pub(super) fn make_queues(setup: &Setup, stage: &Rc<Stage>) -> (Vec<Arc<Queue>>, Vec<Vec<LocalQueue>>) {
    let mut locals: Vec<Vec<LocalQueue>> = setup.is_event_loop.iter().map(|_| Vec::new()).collect();
    let make = |(number, (limits, _))| {
        let config = queue_config(setup, number, limits);
        let (queue, handles) = Queue::new(config).expect("a scenario's queue is possible");
        for (id, handle) in handles.into_iter().enumerate() {
            locals[id].push(attach(number, id, handle, setup.depth, stage));
        }
        queue
    };
    (setup.drives().enumerate().map(make).collect(), locals)
}

/// Makes the stack that splits a reactor's bios of mapped disks for their members.
pub(super) fn make_stack(setup: &Setup, table: &Arc<Table>) -> Option<Stack> {
    let mapped = setup.mapped.as_ref()?;
    let table = Arc::clone(table);
    Some(Stack::new(table, mapped.passed_max, mapped.divided_max))
}

fn queue_config(setup: &Setup, number: usize, limits: &Limits) -> QueueConfig {
    let block = u64::from(setup.block());
    let places = setup.places(number);
    let first = places[0].first;
    let disks = places.into_iter().zip(&setup.read_only).enumerate();
    let disks = disks.map(|(number, (place, &read_only))| DiskConfig {
        name: format!("disk{number}"),
        base: u64::from(place.first - first) * block,
        size: u64::from(place.blocks) * block,
        read_only,
        logical_block: limits.logical_block,
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
        limits: limits.clone(),
        elevator: setup.elevator,
        dispatch: setup.dispatch,
        timeout: setup.timeout,
        merges: setup.merges,
        groups: GroupTree::flat(GROUPS),
        // Most use the default mode; the other one must arrive at the same sums.
        stats: if setup.is_event_loop.len().is_multiple_of(3) {
            StatsMode::UnderGate
        } else {
            StatsMode::Outside
        },
        disks: disks.collect(),
        ..QueueConfig::new("sim", setup.is_event_loop.len() as u16)
    }
}

fn attach(queue: usize, id: usize, handle: QueueHandle, depth: u32, stage: &Rc<Stage>) -> LocalQueue {
    let hctx = HctxId(id as u16);
    let lower = || match &stage.paths {
        Some(paths) => paths.open(hctx, depth, stage),
        None => Box::new(Way::new(queue, hctx.0, Rc::clone(stage))),
    };
    let modelled_hctx =
        || Box::new(ModelledHctx::new(queue, hctx, lower(), Rc::clone(stage))) as Box<dyn HctxDriver>;
    let driver = handle.owns_hctx().then(modelled_hctx);
    handle.attach(driver)
}

/// The number of groups at the start, and the largest number.
pub(super) const GROUPS: u32 = 8;
const STREAM_DRIVE: u64 = 1;
const STREAM_PATHS: u64 = 5;
const STREAM_MORE_DRIVES: u64 = 200;
const STREAM_CLIENTS: u64 = 1000;
