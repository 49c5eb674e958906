//! Tests the guarantees for services on reactors: calls, timers, room, messages to each other, and
//! an orderly end.

mod common;

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::sched;
use blkmq_core::time::{Instant, Nanos};
use blkmq_drivers::null::{Completion, NullConfig};
use blkmq_host::ring::Completion as Completed;
use blkmq_host::service::{Cx, Service, ServiceFactory};
use blkmq_host::{Engine, EngineConfig, Error, QueueId};
use common::{engine, queue, read};

const Q: QueueId = QueueId(0);
const LONG: Nanos = Nanos::from_secs(10);

/// A report of a service to the test.
#[derive(Debug, PartialEq)]
enum News {
    Started(u16),
    Ended(u64),
    Rang(u64),
    Timer(Instant, Instant),
    Room,
    Dropped,
}

/// Submits reads, as many as there is room for, and reports what happens to it.
struct Probe {
    news: Sender<News>,
    waiting: VecDeque<Bio>,
    timer_at: Option<Instant>,
    timer_after: Option<Nanos>,
    ring_user: Option<u64>,
    is_draining: bool,
    outstanding: u32,
}

impl Probe {
    fn new(news: Sender<News>) -> Self {
        Self {
            news,
            waiting: VecDeque::new(),
            timer_at: None,
            timer_after: None,
            ring_user: None,
            is_draining: false,
            outstanding: 0,
        }
    }

    fn reading(news: Sender<News>, count: u64) -> Self {
        let mut probe = Self::new(news);
        probe.waiting.extend((0..count).map(read));
        probe
    }

    fn submit(&mut self, cx: &mut Cx<'_>) {
        while let Some(bio) = self.waiting.pop_front() {
            if let Err(bio) = cx.submit(Q, bio) {
                self.waiting.push_front(bio);
                return;
            }
            self.outstanding += 1;
        }
    }

    fn tell(&self, news: News) {
        // The test may have ended already.
        let _ = self.news.send(news);
    }
}

impl Service for Probe {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.tell(News::Started(cx.reactor().0));
        self.submit(cx);
        if let Some(user) = self.ring_user {
            cx.ring_client().push_nop(user);
        }
        if let Some(after) = self.timer_after {
            let at = cx.now() + after;
            self.timer_at = Some(at);
            cx.set_timer(at + LONG);
            cx.set_timer(at);
        }
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, completed: &[Completed]) {
        completed.iter().for_each(|one| self.tell(News::Rang(one.user)));
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        assert!(bio.status.is_ok(), "{:?}", bio.status);
        self.outstanding -= 1;
        self.tell(News::Ended(bio.cookie));
        self.submit(cx);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if let Some(at) = self.timer_at.take() {
            self.tell(News::Timer(at, cx.now()));
        }
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.tell(News::Room);
        self.submit(cx);
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.is_draining = true;
        self.waiting.clear();
    }

    fn is_finished(&self) -> bool {
        self.is_draining
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        assert_eq!(self.outstanding, 0, "a service was dropped before its bios ended");
        self.tell(News::Dropped);
    }
}

fn factory(probe: Probe) -> ServiceFactory {
    Box::new(move || Box::new(probe))
}

fn next(news: &Receiver<News>) -> News {
    news.recv_timeout(Duration::from_secs(10))
        .expect("news within 10 s")
}

#[test]
fn service_gets_the_ends_of_its_bios_and_its_ring_completions() {
    let engine = engine(2, 0, NullConfig::bare(), sched::NONE);
    let (tell, news) = channel();
    let mut probe = Probe::reading(tell, 3);
    probe.ring_user = Some(77);
    engine.add_service(ReactorId(1), factory(probe));
    assert_eq!(next(&news), News::Started(1));
    let mut rest: Vec<News> = (0..4).map(|_| next(&news)).collect();
    rest.sort_by_key(|news| match news {
        News::Ended(cookie) => *cookie,
        _ => u64::MAX,
    });
    assert_eq!(
        rest,
        [News::Ended(0), News::Ended(1), News::Ended(2), News::Rang(77)]
    );
    engine.shutdown(LONG).unwrap();
    assert_eq!(next(&news), News::Dropped);
}

#[test]
fn reactor_that_hangs_gives_no_sign_of_life_until_it_goes_on() {
    let engine = engine(2, 0, NullConfig::bare(), sched::NONE);
    let control = engine.control();
    let (second, ten_seconds) = (Duration::from_millis(200), Duration::from_secs(10));
    assert!(control.ask_reactors().wait(ten_seconds).is_empty());
    let ((tell, _news), (release, held), (begin, begun)) = (channel(), channel::<()>(), channel());
    let hang = move || {
        begin.send(()).unwrap();
        let _ = held.recv();
        Box::new(Probe::new(tell)) as Box<dyn Service>
    };
    engine.add_service(ReactorId(1), Box::new(hang));
    begun.recv().unwrap();
    let mut answers = control.ask_reactors();
    assert_eq!(answers.wait(second), [ReactorId(1)]);
    drop(release);
    assert!(answers.wait(ten_seconds).is_empty());
    engine.shutdown(LONG).unwrap();
}

#[test]
fn timer_comes_at_its_time_and_the_last_wish_counts() {
    let engine = engine(1, 0, NullConfig::bare(), sched::NONE);
    let (tell, news) = channel();
    let mut probe = Probe::new(tell);
    probe.timer_after = Some(Nanos::from_millis(5));
    engine.add_service(ReactorId(0), factory(probe));
    assert_eq!(next(&news), News::Started(0));
    let News::Timer(wished, came) = next(&news) else {
        panic!("something else than the timer came");
    };
    assert!(
        came >= wished && came.since(wished) < Nanos::from_secs(5),
        "{:?}",
        came.since(wished)
    );
}

#[test]
fn refused_service_is_offered_room_until_all_its_bios_have_passed() {
    let mut spec = queue(
        "q",
        NullConfig {
            completion: Some(Completion::Timer),
            latency: Nanos::from_micros(50),
            ..NullConfig::bare()
        },
        sched::NONE,
    );
    spec.requests_per_reactor = 2;
    let engine = Engine::start(EngineConfig {
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap();
    // However many wait: when two bios have ended, two services are offered room, and one is told
    // that there is no more.
    for (services, bios) in [(2, 50), (64, 4)] {
        let (tell, news) = channel();
        for _ in 0..services {
            engine.add_service(ReactorId(0), factory(Probe::reading(tell.clone(), bios)));
        }
        let (mut ended, mut offers) = (0, 0);
        while ended < services * bios {
            match next(&news) {
                News::Ended(_) => ended += 1,
                News::Room => offers += 1,
                _ => {}
            }
        }
        assert!(
            offers > 0,
            "{services} times {bios} bios cannot have fitted at once"
        );
        assert!(
            offers < 4 * ended,
            "{offers} offers for {ended} bios of {services} services"
        );
    }
}

#[test]
fn service_spawns_others_on_other_reactors() {
    struct Spawner(Sender<News>, bool);
    impl Service for Spawner {
        fn start(&mut self, cx: &mut Cx<'_>) {
            for reactor in 0..cx.reactors() as u16 {
                cx.spawn_on(ReactorId(reactor), factory(Probe::new(self.0.clone())));
            }
            assert_eq!(cx.disk("q").map(|disk| disk.queue), Some(Q));
            self.1 = true;
        }
        fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completed]) {}
        fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}
        fn drain(&mut self, _cx: &mut Cx<'_>) {}
        fn is_finished(&self) -> bool {
            self.1
        }
    }
    let engine = engine(3, 0, NullConfig::bare(), sched::NONE);
    let (tell, news) = channel();
    engine.add_service(ReactorId(2), Box::new(move || Box::new(Spawner(tell, false))));
    let mut started: Vec<u16> = (0..3)
        .map(|_| match next(&news) {
            News::Started(reactor) => reactor,
            other => panic!("{other:?}"),
        })
        .collect();
    started.sort_unstable();
    assert_eq!(started, [0, 1, 2]);
    engine.shutdown(LONG).unwrap();
    assert_eq!(
        [next(&news), next(&news), next(&news)],
        [News::Dropped, News::Dropped, News::Dropped]
    );
}

#[test]
fn shutdown_waits_for_what_is_under_way() {
    let null = NullConfig {
        completion: Some(Completion::Timer),
        latency: Nanos::from_millis(50),
        ..NullConfig::bare()
    };
    let engine = engine(1, 0, null, sched::MQ_DEADLINE);
    let (tell, news) = channel();
    engine.add_service(ReactorId(0), factory(Probe::reading(tell, 8)));
    assert_eq!(next(&news), News::Started(0));
    engine.shutdown(LONG).unwrap();
    let rest: Vec<News> = news.iter().collect();
    assert_eq!(rest.len(), 9, "{rest:?}");
    assert_eq!(rest[8], News::Dropped);
}

#[test]
fn shutdown_that_cannot_finish_says_why_and_can_be_hurried() {
    // No request ends, and the time limit of 30 s is far away.
    let null = NullConfig {
        timeout_rate: blkmq_drivers::null::Rate::new(1.0),
        ..NullConfig::bare()
    };
    let engine = engine(1, 0, null, sched::NONE);
    let (tell, news) = channel();
    engine.add_service(ReactorId(0), factory(Probe::reading(tell, 1)));
    assert_eq!(next(&news), News::Started(0));
    let control = engine.control();
    let hurry = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        control.hurry();
    });
    let error = engine.shutdown(LONG).unwrap_err();
    assert_eq!(
        error.to_string(),
        "shutdown: 1 services are not finished; requests under way: 1 on queue q"
    );
    hurry.join().unwrap();
}

#[test]
fn control_operations_on_a_reactor_are_refused_instead_of_hanging() {
    struct Freezer(blkmq_host::Control, Sender<String>);
    impl Service for Freezer {
        fn start(&mut self, _cx: &mut Cx<'_>) {
            let refused = self.0.freeze(Q).err().map(|error| error.to_string());
            let _ = self.1.send(refused.unwrap_or_default());
        }
        fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completed]) {}
        fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}
        fn drain(&mut self, _cx: &mut Cx<'_>) {}
        fn is_finished(&self) -> bool {
            true
        }
    }
    let engine = engine(1, 0, NullConfig::bare(), sched::NONE);
    let (tell, answer) = channel();
    let control = engine.control();
    engine.add_service(ReactorId(0), Box::new(move || Box::new(Freezer(control, tell))));
    let answer = answer.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(
        answer.contains("queue q") && answer.contains("another thread"),
        "{answer}"
    );
}

#[test]
fn drive_that_cannot_be_opened_fails_the_start_and_leaves_nothing_running() {
    let null = NullConfig {
        setup_failure: Some(1),
        ..NullConfig::bare()
    };
    let started = Engine::start(EngineConfig {
        reactors: 2,
        queues: vec![queue("q", null, sched::NONE)],
        ..EngineConfig::default()
    });
    let error = started.err().expect("the set-up of the second context fails");
    assert!(
        matches!(error, Error::Device { .. }) && error.to_string().starts_with("queue q: "),
        "{error}"
    );
}

#[test]
fn panic_on_a_reactor_aborts_the_process_and_says_so() {
    if std::env::var_os("BLKMQ_TEST_PANIC").is_some() {
        let engine = engine(1, 0, NullConfig::bare(), sched::NONE);
        engine.add_service(ReactorId(0), Box::new(|| panic!("as the test wants it")));
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "panic_on_a_reactor_aborts_the_process_and_says_so",
            "--nocapture",
        ])
        .env("BLKMQ_TEST_PANIC", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    assert!(!child.status.success());
    assert!(
        said.contains("blkmq-r0 has panicked") && said.contains("as the test wants it"),
        "{said}"
    );
}
