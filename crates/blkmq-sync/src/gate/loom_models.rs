//! Loom models of the gate: interleavings that it must survive, and planted faults that they must find.

use loom::thread;

use super::*;
use crate::atomic::faults::Fault;
use crate::atomic::{Arc, AtomicU32};
use crate::model::{check, check_with, join_all};

/// A gate and what each thread published for its holder (plain stores). Inside: what the holders have seen.
struct Scene {
    gate: Gate<[u32; 3]>,
    published: [AtomicU32; 3],
}

impl Scene {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gate: Gate::new([0; 3]),
            published: std::array::from_fn(|_| AtomicU32::new(0)),
        })
    }

    /// Publishes, and passes over everything for as long as the gate says so. Loom watches the value: two
    /// threads inside at once are a causality violation.
    fn publish_and_try(&self, me: usize) {
        self.published[me].store(1, Ordering::Relaxed);
        let mut next = self.gate.try_enter();
        while let Some(mut inside) = next {
            self.pass(&mut inside);
            next = inside.leave().err();
        }
    }

    fn pass(&self, seen: &mut [u32; 3]) {
        for (seen, published) in seen.iter_mut().zip(&self.published) {
            *seen = (*seen).max(published.load(Ordering::Relaxed));
        }
    }

    /// What the holders have seen, when all threads have ended.
    fn seen(&self) -> [u32; 3] {
        *self.gate.try_enter().expect("free at the end")
    }
}

fn spawn(scene: &Arc<Scene>, act: impl FnOnce(&Scene) + 'static) -> thread::JoinHandle<()> {
    let scene = Arc::clone(scene);
    thread::spawn(move || act(&scene))
}

#[test]
fn two_threads_exclude_each_other_and_lose_no_work() {
    check(|| {
        let scene = Scene::new();
        join_all([0, 1].map(|me| spawn(&scene, move |scene| scene.publish_and_try(me))));
        assert_eq!(scene.seen(), [1, 1, 0]);
    });
}

/// The third thread may find the mark on the gate already, and then only loads.
fn three_threads() {
    let scene = Scene::new();
    join_all([0, 1, 2].map(|me| spawn(&scene, move |scene| scene.publish_and_try(me))));
    assert_eq!(scene.seen(), [1, 1, 1], "work was lost");
}

#[test]
fn three_threads_exclude_each_other_and_lose_no_work() {
    check(three_threads);
}

#[test]
#[should_panic(expected = "work was lost")]
fn thread_that_looks_at_the_mark_without_a_fence_is_found() {
    check_with(Fault::NoFullFence, three_threads);
}

#[test]
#[should_panic(expected = "work was lost")]
fn holder_that_looks_without_a_fence_is_found() {
    check_with(Fault::NoFenceAfterRmw, three_threads);
}

#[test]
#[should_panic(expected = "work was lost")]
fn holder_that_drops_the_mark_is_found() {
    fn publish_and_try(scene: &Scene, me: usize) {
        scene.published[me].store(1, Ordering::Relaxed);
        if let Some(mut inside) = scene.gate.try_enter() {
            scene.pass(&mut inside);
            let _ = inside.leave_owing();
        }
    }
    check(|| {
        let scene = Scene::new();
        join_all([0, 1].map(|me| spawn(&scene, move |scene| publish_and_try(scene, me))));
        assert_eq!(scene.seen(), [1, 1, 0], "work was lost");
    });
}

#[test]
fn run_that_is_owed_and_made_loses_no_work() {
    check(|| {
        let scene = Scene::new();
        let other = spawn(&scene, |scene| scene.publish_and_try(1));
        scene.published[0].store(1, Ordering::Relaxed);
        let mut is_owed = true;
        while is_owed {
            let Some(mut inside) = scene.gate.try_enter() else {
                break;
            };
            scene.pass(&mut inside);
            is_owed = inside.leave_owing();
        }
        other.join().unwrap();
        assert_eq!(scene.seen(), [1, 1, 0]);
    });
}

#[test]
fn mark_of_a_dropped_guard_makes_the_next_holder_look_again() {
    check(|| {
        let scene = Scene::new();
        let other = spawn(&scene, |scene| scene.publish_and_try(1));
        let dropper = spawn(&scene, |scene| drop(scene.gate.try_enter()));
        join_all([dropper, other]);
        let is_seen = scene.gate.try_enter().is_some_and(|inside| inside[1] == 1);
        assert!(is_seen || scene.gate.is_owed(), "a mark was lost in silence");
    });
}
