//! Loom models of run work: interleavings that it must survive, and planted faults that they must find.

use loom::thread;

use super::*;
use crate::atomic::faults::Fault;
use crate::atomic::{Arc, AtomicU32, UnsafeCell};
use crate::model::{check, check_with, join_all};

/// A context, what each submitter published for it (plain stores), and how often it was announced to the owner.
#[derive(Default)]
struct Context {
    work: RunWork,
    published: [AtomicU32; 2],
    kicks: AtomicU32,
}

/// What an owner has done: passes, and those of them for which it had to be notified.
#[derive(Default)]
struct Owner {
    seen: u32,
    announced_passes: u32,
}

impl Context {
    fn submit(&self, me: usize) {
        self.published[me].store(1, Ordering::Relaxed);
        self.announce(self.work.run());
    }

    fn announce(&self, kick: Kick) {
        if kick == Kick::Wake {
            self.kicks.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn published(&self) -> u32 {
        self.published
            .iter()
            .map(|published| published.load(Ordering::Relaxed))
            .sum()
    }

    /// The owner checks whether a pass is due, at time 0, and makes passes until none is.
    fn look(&self, owner: &mut Owner) {
        let mut is_again = false;
        while self.work.take(0) {
            owner.announced_passes += u32::from(!is_again);
            owner.seen = self.published();
            is_again = self.work.finish();
        }
    }

    /// The owner checks for the last time, when all others have ended: what was published must have been
    /// seen, and each pass that did not follow from another one must have been announced once.
    fn close(&self, mut owner: Owner, all: u32) {
        self.look(&mut owner);
        assert_eq!(owner.seen, all, "a run was lost");
        assert_eq!(
            self.kicks.load(Ordering::Relaxed),
            owner.announced_passes,
            "wake-ups and passes differ"
        );
    }
}

fn spawn<T, R>(shared: &Arc<T>, act: impl FnOnce(&T) -> R + 'static) -> thread::JoinHandle<R>
where
    T: 'static,
    R: 'static,
{
    let shared = Arc::clone(shared);
    thread::spawn(move || act(&shared))
}

/// An owner that checks `times` times.
fn spawn_owner(context: &Arc<Context>, times: usize) -> thread::JoinHandle<Owner> {
    spawn(context, move |context| {
        let mut owner = Owner::default();
        (0..times).for_each(|_| context.look(&mut owner));
        owner
    })
}

/// Flaw (a): the submitter publishes with plain stores, sees the run wanted and leaves, while the owner
/// clears the mark and looks at a list that is still empty.
fn two_submitters_and_an_owner() {
    let context = Arc::new(Context::default());
    let submitters = [0, 1].map(|me| spawn(&context, move |context| context.submit(me)));
    let owner = spawn_owner(&context, 1);
    join_all(submitters);
    context.close(owner.join().unwrap(), 2);
}

/// One submitter runs two contexts after one publication, while both are wanted and their owner takes them.
fn one_publication_for_two_contexts() {
    let contexts = Arc::new([Context::default(), Context::default()]);
    contexts
        .iter()
        .for_each(|context| context.announce(context.work.run()));
    let submitter = spawn(&contexts, |contexts| {
        contexts[0].published[0].store(1, Ordering::Relaxed);
        contexts[1].published[0].store(1, Ordering::Relaxed);
        let published = Published::now();
        for context in contexts {
            context.announce(context.work.run_published(&published));
        }
    });
    let owners = spawn(&contexts, |contexts| {
        [0, 1].map(|index| {
            let mut owner = Owner::default();
            contexts[index].look(&mut owner);
            owner
        })
    });
    submitter.join().unwrap();
    for (context, owner) in contexts.iter().zip(owners.join().unwrap()) {
        context.close(owner, 1);
    }
}

#[test]
fn one_fence_serves_the_runs_of_many_contexts() {
    check(one_publication_for_two_contexts);
}

#[test]
#[should_panic(expected = "a run was lost")]
fn one_publication_without_its_fence_is_found() {
    check_with(Fault::NoFullFence, one_publication_for_two_contexts);
}

#[test]
fn owner_that_runs_itself_among_others_loses_nothing() {
    check(|| {
        let context = Arc::new(Context::default());
        let submitter = spawn(&context, |context| context.submit(0));
        let owner = spawn(&context, |context| {
            let mut owner = Owner::default();
            context.announce(context.work.run_by_owner());
            context.look(&mut owner);
            context.published[1].store(1, Ordering::Relaxed);
            context.announce(context.work.run_by_owner());
            owner
        });
        submitter.join().unwrap();
        context.close(owner.join().unwrap(), 2);
    });
}

#[test]
fn flaw_a_no_run_is_lost_between_submitters_and_the_owner() {
    check(two_submitters_and_an_owner);
}

#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_a_a_submitter_that_loads_the_mark_without_a_fence_is_found() {
    check_with(Fault::NoFullFence, two_submitters_and_an_owner);
}

#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_a_an_owner_that_looks_without_a_fence_is_found() {
    check_with(Fault::NoFenceAfterRmw, two_submitters_and_an_owner);
}

#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_a_an_owner_that_looks_before_it_clears_is_found() {
    check(|| {
        let context = Arc::new(Context::default());
        let submitter = spawn(&context, |context| context.submit(0));
        let owner = spawn(&context, |context| {
            let seen = context.published();
            if context.work.take(0) {
                context.work.finish();
            }
            seen
        });
        submitter.join().unwrap();
        let seen = owner.join().unwrap();
        assert!(seen == 1 || context.work.is_wanted(), "a run was lost");
    });
}

/// Flaws (b) and (c): a stop takes the queued run back while a submitter requests one; the start must run it,
/// and later runs are announced as before.
#[test]
fn flaws_b_and_c_no_run_is_lost_to_a_stop_that_is_followed_by_a_start() {
    check(|| {
        let context = Arc::new(Context::default());
        let submitter = spawn(&context, |context| context.submit(0));
        let stopper = spawn(&context, |context| {
            context.work.stop();
            assert!(context.work.is_stopped());
            context.announce(context.work.start());
        });
        let owner = spawn_owner(&context, 1);
        join_all([submitter, stopper]);
        let mut owner = owner.join().unwrap();
        context.look(&mut owner);
        assert_eq!(owner.seen, 1, "a run was lost");
        assert_eq!(context.work.run(), Kick::Wake);
    });
}

/// The mark in a word of its own, and a cancel that takes the queued run back but not the mark.
#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_b_a_cancel_that_forgets_the_mark_is_found() {
    #[derive(Default)]
    struct Broken {
        is_marked: AtomicU32,
        is_queued: AtomicU32,
    }
    impl Broken {
        fn run(&self) {
            if self.is_marked.swap(1, Ordering::AcqRel) == 0 {
                self.is_queued.store(1, Ordering::Release);
            }
        }
    }
    check(|| {
        let broken = Arc::new(Broken::default());
        let submitter = spawn(&broken, Broken::run);
        let canceller = spawn(&broken, |broken| broken.is_queued.store(0, Ordering::Release));
        join_all([submitter, canceller]);
        broken.run();
        assert_eq!(broken.is_queued.load(Ordering::Acquire), 1, "a run was lost");
    });
}

/// A start that queues a run only if it saw a request for one, in a word of its own, and so misses a
/// submitter that checked the stop before and has not requested its run yet.
#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_c_a_start_that_runs_only_what_it_saw_asked_for_is_found() {
    check(|| {
        let words = Arc::new([AtomicU32::new(1), AtomicU32::new(0)]); // Is stopped; was requested.
        let submitter = spawn(&words, |[is_stopped, is_asked]| {
            let must_leave = is_stopped.load(Ordering::Acquire) == 1;
            is_asked.store(must_leave.into(), Ordering::Release);
            !must_leave
        });
        let starter = spawn(&words, |[is_stopped, is_asked]| {
            is_stopped.store(0, Ordering::Release);
            is_asked.load(Ordering::Acquire) == 1
        });
        let is_run_by_submitter = submitter.join().unwrap();
        let is_run_by_start = starter.join().unwrap();
        assert!(is_run_by_start || is_run_by_submitter, "a run was lost");
    });
}

/// Flaw (d): whatever the order of an immediate and a delayed run, the immediate one is made at once.
#[test]
fn flaw_d_an_immediate_run_is_never_postponed_by_a_delayed_one() {
    check(|| {
        let context = Arc::new(Context::default());
        let delayer = spawn(&context, |context| {
            let _ = context.work.run_delayed(1_000_000);
        });
        let submitter = spawn(&context, |context| context.submit(0));
        let owner = spawn_owner(&context, 1);
        join_all([submitter, delayer]);
        context.close(owner.join().unwrap(), 1); // At time 0: the delayed run is not due.
    });
}

/// A delayed run that sets its deadline over an immediate one.
#[test]
#[should_panic(expected = "a run was lost")]
fn flaw_d_a_delayed_run_that_replaces_an_immediate_one_is_found() {
    check(|| {
        let context = Arc::new(Context::default());
        let delayer = spawn(&context, |context| {
            context.work.0.swap(1_000 << DEADLINE_SHIFT, Ordering::AcqRel);
        });
        let submitter = spawn(&context, |context| context.submit(0));
        join_all([submitter, delayer]);
        context.close(Owner::default(), 1);
    });
}

/// Flaw (e): of two deadlines the earlier one stays, and the thread that made it earlier is told to arm the timer.
#[test]
fn flaw_e_the_earlier_of_two_deadlines_stays() {
    check(|| {
        let context = Arc::new(Context::default());
        let later = spawn(&context, |context| {
            let _ = context.work.run_delayed(9_000);
        });
        let earlier = spawn(&context, |context| {
            let delay = context.work.run_delayed(4_000);
            assert_eq!(delay, Delay::Rearm, "it is the earlier one in either order");
        });
        join_all([later, earlier]);
        assert_eq!(context.work.deadline(), Some(4_000));
        assert!(!context.work.take(3_999) && context.work.take(4_000));
    });
}

/// A delayed run that arms the timer again, whatever is pending: repeated requests keep the run away for ever.
#[test]
#[should_panic(expected = "was pushed back")]
fn flaw_e_a_delayed_run_that_rearms_a_pending_one_is_found() {
    check(|| {
        let context = Arc::new(Context::default());
        let [earlier, later] = [4_u64, 9].map(|units| {
            spawn(&context, move |context| {
                context.work.update(|word| match word & WANTED {
                    0 => (word & FLAGS | units << DEADLINE_SHIFT, ()),
                    _ => (word, ()),
                });
            })
        });
        join_all([earlier, later]);
        assert!(context.work.take(4_000), "the earlier run was pushed back");
    });
}

#[test]
fn delayed_run_asked_for_during_a_pass_is_known_when_it_ends() {
    check(|| {
        let context = Arc::new(Context::default());
        let _ = context.work.run();
        let delayer = spawn(&context, |context| {
            let _ = context.work.run_delayed(5_000);
        });
        let owner = spawn(&context, |context| {
            let is_taken = context.work.take(0);
            (is_taken, is_taken && context.work.finish())
        });
        delayer.join().unwrap();
        let (is_taken, is_again) = owner.join().unwrap();
        assert!(is_taken && !is_again, "a delayed run makes no pass at once");
        // A request before the pass was part of the immediate run; one during or after it must still be pending.
        assert!(matches!(context.work.deadline(), None | Some(5_000)));
    });
}

/// Quiesce: after a stop, once no pass is being made, none begins, and the effects of the last one are
/// visible. Loom reports a pass and the stopper that touch the driver at once, or without order.
#[test]
fn nothing_runs_after_a_stop_was_seen_to_be_complete() {
    struct Quiesced {
        work: RunWork,
        driver: UnsafeCell<u32>,
    }
    // SAFETY: this is what the model must show: a pass touches the driver, or the stopper when no pass is being made.
    unsafe impl Sync for Quiesced {}
    impl Quiesced {
        fn touch_driver(&self) {
            self.driver.with_mut(|driver| {
                // SAFETY: as above.
                unsafe { driver.write(1) };
            });
        }
    }
    check(|| {
        let context = Arc::new(Quiesced {
            work: RunWork::new(),
            driver: UnsafeCell::new(0),
        });
        let _ = context.work.run();
        let owner = spawn(&context, |context| {
            if context.work.take(0) {
                context.touch_driver();
                context.work.finish();
            }
        });
        let stopper = spawn(&context, |context| {
            context.work.stop();
            if !context.work.is_running() {
                context.touch_driver();
            }
        });
        join_all([owner, stopper]);
    });
}
