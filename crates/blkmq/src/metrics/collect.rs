//! The metrics: names and units by Prometheus' conventions, labels by what operators name (queue, group,
//! address). The number of active groups bounds the number of series.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use blkmq_config::Detail;
use blkmq_core::bio::Direction;
use blkmq_core::local::InFlight;
use blkmq_core::stat::{GroupStats, Histogram};
use blkmq_host::device::State;
use blkmq_host::disk::Disk;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::control::{Daemon, GroupReading, Reading};

/// The format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    OpenMetrics,
    /// Prometheus' older format: a counter has the name of its series, and units have no line.
    Classic,
}

/// All metrics.
///
/// # Errors
/// They cannot be written.
pub(super) fn text(daemon: &Daemon, form: Form, detail: Detail) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("blkmq");
    let taken = Taken::take(daemon, form, detail);
    let groups: usize = taken.queues.iter().map(|queue| queue.groups.len()).sum();
    let bytes = OTHER_BYTES + taken.queues.len() * QUEUE_BYTES + groups * GROUP_BYTES;
    registry.register_collector(Box::new(taken));
    let mut text = String::with_capacity(bytes);
    match form {
        Form::OpenMetrics => encode(&mut text, &registry)?,
        Form::Classic => encode_registry(&mut text, &registry)?,
    }
    Ok(text)
}

/// The counts at one moment.
#[derive(Debug)]
struct Taken {
    form: Form,
    uptime_s: f64,
    queues: Vec<Arc<Reading>>,
    addresses: Vec<blkmq_export::common::AddressStats>,
    disks: Vec<(String, u64, usize, State)>,
    memory: (u64, u64),
}

impl Taken {
    fn take(daemon: &Daemon, form: Form, detail: Detail) -> Self {
        let (control, common) = (daemon.running.control(), daemon.running.common());
        let disks = control.disks();
        if detail.disks {
            // All of them first: a disk on others has their state.
            disks.iter().for_each(Disk::look);
        }
        let queues = daemon.readings.take(daemon);
        Self {
            form,
            uptime_s: daemon.started.elapsed().as_secs_f64(),
            queues: match detail.group_levels {
                None => queues,
                Some(levels) => queues.iter().map(|queue| queue.summed(levels).into()).collect(),
            },
            addresses: if detail.exports {
                common.connections.stats()
            } else {
                Vec::new()
            },
            disks: disks
                .iter()
                .filter(|_| detail.disks)
                .map(|disk| (disk.name.clone(), disk.size, disk.users.count(), disk.state()))
                .collect(),
            memory: (common.memory.used(), common.memory.bytes_max()),
        }
    }
}

/// Each active group, with its labels.
fn groups_of(reading: &Reading) -> impl Iterator<Item = ([(&'static str, &str); 2], &GroupStats)> {
    let groups = reading.groups.iter();
    groups.map(|group| (labels_of(reading, group), &group.stats))
}

fn labels_of<'a>(reading: &'a Reading, group: &'a GroupReading) -> [(&'static str, &'a str); 2] {
    [("queue", &*reading.name), ("group", &*group.path)]
}

impl Collector for Taken {
    fn encode(&self, to: DescriptorEncoder<'_>) -> fmt::Result {
        let form = self.form;
        let to = &mut Sink { to, form };
        gauge(
            to,
            "uptime",
            "Since the daemon began",
            Some(Unit::Seconds),
            |put| put(&[], self.uptime_s),
        )?;
        self.encode_groups(to)?;
        self.encode_queues(to)?;
        gauge(to, "disk_size", "Size of a disk", Some(Unit::Bytes), |put| {
            each(&self.disks, |(name, size, ..)| {
                put(&[("disk", name)], *size as f64)
            })
        })?;
        gauge(
            to,
            "disk_clients",
            "Connections that have selected a disk",
            None,
            |put| {
                each(&self.disks, |(name, _, clients, _)| {
                    put(&[("disk", name)], *clients as f64)
                })
            },
        )?;
        gauge(to, "disk_state", "Whether a disk is in this state", None, |put| {
            each(&self.disks, |(name, .., state)| {
                each(&State::ALL, |one| {
                    let is_in_it = f64::from(u8::from(one == state));
                    put(&[("disk", name), ("state", one.name())], is_in_it)
                })
            })
        })?;
        self.encode_addresses(to)?;
        gauge(
            to,
            "nbd_memory_used",
            "Payload that NBD connections hold",
            Some(Unit::Bytes),
            |put| put(&[], self.memory.0 as f64),
        )?;
        gauge(
            to,
            "nbd_memory_limit",
            "Payload that they may hold",
            Some(Unit::Bytes),
            |put| put(&[], self.memory.1 as f64),
        )
    }
}

impl Taken {
    fn encode_groups(&self, to: &mut Sink<'_>) -> fmt::Result {
        let groups = || self.queues.iter().flat_map(|queue| groups_of(queue));
        let directions: [(&str, &str, Option<Unit>, CountOf); 4] = [
            ("group_operations", "I/Os that ended", None, |stats, of| {
                stats.of(of).ios
            }),
            (
                "group_transferred",
                "Bytes of them",
                Some(Unit::Bytes),
                |stats, of| stats.of(of).bytes,
            ),
            (
                "group_merged",
                "I/Os that joined another one",
                None,
                |stats, of| stats.of(of).merged,
            ),
            ("group_errors", "I/Os that failed", None, |stats, of| {
                stats.of(of).errors
            }),
        ];
        for (name, help, unit, count) in directions {
            counter(to, name, help, unit, |put| {
                for (labels, stats) in groups() {
                    for direction in Direction::ALL {
                        let labels = [labels[0], labels[1], ("direction", name_of(direction))];
                        put(&labels, count(stats, direction) as f64)?;
                    }
                }
                Ok(())
            })?;
        }
        histograms(
            to,
            "group_wait",
            "From insertion to issue, of I/Os that waited",
            groups().map(|(labels, stats)| (labels, &stats.wait, stats.total().wait_ns)),
        )?;
        histograms(
            to,
            "group_device",
            "From issue to end",
            groups().map(|(labels, stats)| (labels, &stats.device, stats.total().service_ns)),
        )?;
        gauge(
            to,
            "group_queued",
            "I/Os that are in the scheduler",
            None,
            |put| groups().try_for_each(|(labels, stats)| put(&labels, stats.queued as f64)),
        )?;
        let in_flight: [(&str, &str, Option<Unit>, AmountOf); 2] = [
            ("group_in_flight", "Requests that are at the drive", None, |has| {
                has.requests as f64
            }),
            (
                "group_oldest",
                "How long the oldest of them has been there; 0 without any",
                Some(Unit::Seconds),
                |has| seconds(has.oldest.0),
            ),
        ];
        for (name, help, unit, value) in in_flight {
            gauge(to, name, help, unit, |put| {
                // Where reactors have not answered, nothing is said.
                let known = self.queues.iter().filter(|queue| queue.knows_in_flight);
                let mut groups = known.flat_map(|queue| queue.groups.iter().map(move |group| (queue, group)));
                groups.try_for_each(|(queue, group)| put(&labels_of(queue, group), value(group.in_flight)))
            })?;
        }
        counter(
            to,
            "group_delayed",
            "Time that a group's I/Os waited while those of another one were served",
            Some(Unit::Seconds),
            |put| {
                for queue in &self.queues {
                    for (who, behind, ns) in &queue.delays {
                        put(
                            &[("queue", &queue.name), ("group", who), ("behind", behind)],
                            seconds(*ns),
                        )?;
                    }
                }
                Ok(())
            },
        )
    }

    fn encode_queues(&self, to: &mut Sink<'_>) -> fmt::Result {
        gauge(
            to,
            "queue_in_flight",
            "Requests that have begun and not ended",
            None,
            |put| {
                each(&self.queues, |queue| {
                    put(&[("queue", &queue.name)], queue.state.in_flight as f64)
                })
            },
        )?;
        gauge(
            to,
            "queue_depth",
            "Requests that may be at the drive",
            None,
            |put| {
                each(&self.queues, |queue| {
                    put(&[("queue", &queue.name)], queue.state.depth.into())
                })
            },
        )?;
        gauge(
            to,
            "queue_depth_limit",
            "Requests that may be at the drive now: fewer while groups compete below bfq",
            None,
            |put| {
                each(&self.queues, |queue| {
                    put(&[("queue", &queue.name)], queue.state.depth_limit.into())
                })
            },
        )?;
        gauge(
            to,
            "queue_scheduler",
            "1 for the scheduler that the queue has",
            None,
            |put| {
                each(&self.queues, |queue| {
                    put(&[("queue", &queue.name), ("scheduler", queue.state.sched)], 1.0)
                })
            },
        )?;
        counter(to, "queue_events", "How often a queue did what", None, |put| {
            each(&self.queues, |queue| {
                each(&queue.state.events.fields(), |(event, count)| {
                    put(&[("queue", &queue.name), ("event", event)], *count as f64)
                })
            })
        })
    }

    fn encode_addresses(&self, to: &mut Sink<'_>) -> fmt::Result {
        let addresses = &self.addresses;
        gauge(
            to,
            "export_connections",
            "Connections that are open",
            None,
            |put| each(addresses, |one| put(&[("address", &one.name)], one.open.into())),
        )?;
        gauge(
            to,
            "export_connections_limit",
            "Connections that may be open",
            None,
            |put| each(addresses, |one| put(&[("address", &one.name)], one.max.into())),
        )?;
        counter(
            to,
            "export_refused",
            "Connections that found no room",
            None,
            |put| {
                each(addresses, |one| {
                    put(&[("address", &one.name)], one.refused as f64)
                })
            },
        )
    }
}

/// One count of a group.
type CountOf = fn(&GroupStats, Direction) -> u64;

/// One figure of what a group has in flight.
type AmountOf = fn(InFlight) -> f64;

/// Labels with their values, and a value.
type Put<'a> = dyn FnMut(&[(&str, &str)], f64) -> fmt::Result + 'a;

fn name_of(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
        Direction::Discard => "discard",
        Direction::Flush => "flush",
    }
}

/// The output of metrics, in either format.
struct Sink<'a> {
    to: DescriptorEncoder<'a>,
    form: Form,
}

impl Sink<'_> {
    /// The name and the unit that head a metric whose series have this suffix.
    fn head<'n>(&self, name: &'n str, unit: Option<Unit>, suffix: &str) -> (Cow<'n, str>, Option<Unit>) {
        match (self.form, unit) {
            (Form::OpenMetrics, unit) => (name.into(), unit),
            (Form::Classic, Some(unit)) => (format!("{name}_{}{suffix}", unit.as_str()).into(), None),
            (Form::Classic, None) => (format!("{name}{suffix}").into(), None),
        }
    }
}

fn counter(
    to: &mut Sink<'_>,
    name: &str,
    help: &str,
    unit: Option<Unit>,
    all: impl FnOnce(&mut Put<'_>) -> fmt::Result,
) -> fmt::Result {
    let form = to.form;
    let (name, unit) = to.head(name, unit, "_total");
    let mut metric = to
        .to
        .encode_descriptor(&name, help, unit.as_ref(), MetricType::Counter)?;
    all(&mut |labels, value| {
        let metric = metric.encode_family(&labels)?;
        match form {
            Form::OpenMetrics => ConstCounter::new(value).encode(metric),
            // Its name has the suffix already; the encoder of a gauge adds none.
            Form::Classic => ConstGauge::new(value).encode(metric),
        }
    })
}

fn gauge(
    to: &mut Sink<'_>,
    name: &str,
    help: &str,
    unit: Option<Unit>,
    all: impl FnOnce(&mut Put<'_>) -> fmt::Result,
) -> fmt::Result {
    let (name, unit) = to.head(name, unit, "");
    let mut metric = to
        .to
        .encode_descriptor(&name, help, unit.as_ref(), MetricType::Gauge)?;
    all(&mut |labels, value| ConstGauge::new(value).encode(metric.encode_family(&labels)?))
}

/// Classic histograms: with buckets of half an octave there would be too many series, so four
/// octaves are one bucket.
fn histograms<'a>(
    to: &mut Sink<'_>,
    name: &str,
    help: &str,
    all: impl Iterator<Item = ([(&'static str, &'a str); 2], &'a Histogram, u64)>,
) -> fmt::Result {
    let (name, unit) = to.head(name, Some(Unit::Seconds), "");
    let mut metric = to
        .to
        .encode_descriptor(&name, help, unit.as_ref(), MetricType::Histogram)?;
    for (labels, histogram, sum_ns) in all {
        let mut counts = [0; BOUNDS.len()];
        for (bound, count) in histogram.buckets() {
            let place = BOUNDS.iter().position(|upper| bound.0 as f64 <= upper * 1e9);
            counts[place.unwrap_or(BOUNDS.len() - 1)] += count;
        }
        let buckets: Vec<(f64, u64)> = BOUNDS.into_iter().zip(counts).collect();
        let labels = &labels[..];
        let mut one: MetricEncoder<'_> = metric.encode_family(&labels)?;
        one.encode_histogram::<NoLabelSet>(seconds(sum_ns), histogram.count(), &buckets, None)?;
    }
    Ok(())
}

fn each<T>(all: &[T], put: impl FnMut(&T) -> fmt::Result) -> fmt::Result {
    all.iter().try_for_each(put)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Approximate size of the series of one group, of a queue with a disk, and of all others.
const GROUP_BYTES: usize = 5 << 10;
const QUEUE_BYTES: usize = 1 << 10;
const OTHER_BYTES: usize = 64 << 10;
/// The bounds of buckets, in seconds; those of the counts behind them are powers of two of
/// microseconds.
const BOUNDS: [f64; 14] = [
    4e-6,
    16e-6,
    64e-6,
    256e-6,
    1.024e-3,
    4.096e-3,
    16.384e-3,
    65.536e-3,
    0.262_144,
    1.048_576,
    4.194_304,
    16.777_216,
    67.108_864,
    f64::INFINITY,
];
