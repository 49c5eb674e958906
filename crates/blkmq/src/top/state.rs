//! The content of the screen, apart from the terminal: which lines there are, in which order, and which is
//! selected. `keys` changes it, `view` draws it.

mod lines;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::columns::COLUMNS;
use super::feed::Sample;
use super::lists::Lists;
use super::tree::{self, Key, Node, Row, Tree};
use crate::control::statistics::{QueueStatistics, Statistics};
use crate::rates::{Interval, Samples};

/// Everything that is shown, and how.
#[derive(Debug, Default)]
pub(super) struct State {
    samples: Samples,
    pub(super) head: Head,
    tree: Vec<Arc<Node>>,
    /// What it was made of.
    of: Tree,
    /// The lines of the tree that are open and pass the filter.
    pub(super) lines: Vec<Line>,
    /// Of each line; also while the screen is frozen.
    history: HashMap<Key, History>,
    /// How many samples there were.
    turn: u64,
    pub(super) selected: Option<Key>,
    /// The first line on the screen.
    pub(super) top: usize,
    /// The number of lines that fitted on the screen when it was drawn last.
    pub(super) page: usize,
    /// Lines in another state than the default: groups with only disks below them are closed, all
    /// others open.
    toggled: BTreeSet<Key>,
    pub(super) shape: Shape,
    pub(super) sort: Sort,
    pub(super) is_reversed: bool,
    pub(super) hides_idle: bool,
    pub(super) filter: String,
    pub(super) sought: String,
    pub(super) mode: Mode,
    pub(super) is_frozen: bool,
    /// Why no samples arrive, if so.
    pub(super) lost: Option<String>,
    pub(super) is_over: bool,
}

/// The head of the screen.
#[derive(Clone, Debug, Default)]
pub(super) struct Head {
    pub(super) uptime_s: u64,
    pub(super) seconds: f64,
    pub(super) queues: usize,
    pub(super) groups: usize,
    pub(super) disks: usize,
    pub(super) connections: u32,
    pub(super) iops: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) in_flight: u64,
    pub(super) memory_used: u64,
    pub(super) memory_max: u64,
}

/// A line on the screen.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) row: Arc<Row>,
    pub(super) depth: usize,
    pub(super) fold: Fold,
}

/// What a line did.
#[derive(Debug, Default)]
struct History {
    /// I/Os per second, the newest last.
    iops: VecDeque<u64>,
    /// The last sample that had the line.
    turn: u64,
}

/// Whether the lines below one are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    /// There are none.
    Leaf,
    Open,
    Closed,
}

/// How lines are arranged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Shape {
    #[default]
    Tree,
    /// Groups alone, of all queues, sorted together.
    List,
}

/// The sort order of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Name,
    /// By the number of a column.
    Column(usize),
}

impl Default for Sort {
    fn default() -> Self {
        Self::Column(0)
    }
}

/// The meaning of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    #[default]
    Lines,
    /// A search text is being typed.
    Search,
    /// A filter text is being typed.
    Filter,
    Help,
}

impl State {
    /// Takes a sample of the daemon. The first one gives the daemon's objects, the second one also
    /// its activity.
    pub(super) fn take(&mut self, sample: Sample) {
        self.lost = None;
        let Sample { statistics, lists } = sample;
        let interval = match self.samples.take(statistics.clone()) {
            Some(interval) => interval,
            None if self.tree.is_empty() => idle(&statistics),
            // Of another daemon than before: nothing is known of it yet, and the last screen stays so long.
            None => return,
        };
        let tree = self.of.build(&interval, &lists);
        self.remember(&tree);
        if !self.is_frozen {
            self.head = head(&statistics, &interval, &lists);
            self.tree = tree;
            self.arrange();
        }
    }

    /// The daemon is lost. The next one that answers may be another, whose counts begin anew.
    pub(super) fn lose(&mut self, why: String) {
        self.lost = Some(why);
        self.samples = Samples::default();
    }

    /// The selected line's index among the shown ones.
    pub(super) fn selected_line(&self) -> Option<usize> {
        match &self.selected {
            Some(selected) => self.lines.iter().position(|line| line.row.key == *selected),
            // Until the user moves it is the first one.
            None => (!self.lines.is_empty()).then_some(0),
        }
    }

    /// The history of the selected line, the newest last.
    pub(super) fn history(&self) -> Option<(&Row, &VecDeque<u64>)> {
        let line = &self.lines[self.selected_line()?];
        Some((&line.row, &self.history.get(&line.row.key)?.iops))
    }

    /// Moves the selection by this many lines, as far as there are lines.
    pub(super) fn go(&mut self, by: isize) {
        let at = self.selected_line().unwrap_or(0);
        let to = at
            .saturating_add_signed(by)
            .min(self.lines.len().saturating_sub(1));
        self.selected = self.lines.get(to).map(|line| line.row.key.clone());
    }

    /// Opens or closes the selected line, or toggles it.
    pub(super) fn fold(&mut self, to: Option<Fold>) {
        let Some(at) = self.selected_line() else { return };
        let line = &self.lines[at];
        if line.fold == Fold::Leaf || to == Some(line.fold) {
            return;
        }
        let key = line.row.key.clone();
        if !self.toggled.remove(&key) {
            self.toggled.insert(key);
        }
        self.arrange();
    }

    /// Selects the next line, from `skip` on, that contains the search text.
    pub(super) fn find(&mut self, skip: usize) {
        let start = self.selected_line().unwrap_or(0) + skip;
        let lines = self.lines.iter().cycle().skip(start).take(self.lines.len());
        let mut found = lines.filter(|line| lines::has(&line.row, &self.sought));
        if let Some(line) = found.next() {
            self.selected = Some(line.row.key.clone());
        }
    }

    /// Moves the sort order by this many of the shown columns.
    pub(super) fn sort_on(&mut self, shown: &[usize], by: isize) {
        // The name is before the first column.
        let at = match self.sort {
            Sort::Name => 0,
            Sort::Column(column) => shown.iter().position(|one| *one == column).map_or(0, |at| at + 1),
        };
        let to = (at as isize + by).rem_euclid(shown.len() as isize + 1);
        self.sort = match to {
            0 => Sort::Name,
            to => Sort::Column(shown[to as usize - 1]),
        };
        self.arrange();
    }

    fn remember(&mut self, tree: &[Arc<Node>]) {
        self.turn += 1;
        let mut left: Vec<&Arc<Node>> = tree.iter().collect();
        while let Some(node) = left.pop() {
            left.extend(&node.children);
            let Some(numbers) = &node.row.numbers else {
                continue;
            };
            let history = match self.history.get_mut(&node.row.key) {
                Some(history) => history,
                None => self.history.entry(node.row.key.clone()).or_default(),
            };
            history.turn = self.turn;
            history.iops.push_back(numbers.iops.round() as u64);
            if history.iops.len() > HISTORY_MAX {
                history.iops.pop_front();
            }
        }
        self.history.retain(|_, history| history.turn == self.turn);
    }
}

/// For the first sample: the present state, with no activity.
fn idle(now: &Statistics) -> Interval {
    let idle = |queue: &Arc<QueueStatistics>| {
        Arc::new(QueueStatistics {
            groups: Vec::new(),
            delays: Vec::new(),
            ..(**queue).clone()
        })
    };
    Interval {
        seconds: 1.0,
        queues: now.queues.iter().map(idle).collect(),
    }
}

fn head(now: &Statistics, interval: &Interval, lists: &Lists) -> Head {
    let paths = lists.groups.iter().map(|group| group.path.as_str());
    let groups: BTreeSet<&str> = paths.filter(|path| *path != tree::ROOT).collect();
    let mut head = Head {
        uptime_s: now.uptime_ns / 1_000_000_000,
        seconds: interval.seconds,
        queues: now.queues.len(),
        groups: groups.len(),
        disks: lists.disks.len(),
        connections: now.exports.iter().map(|export| export.open).sum(),
        memory_used: now.nbd_memory.used,
        memory_max: now.nbd_memory.max,
        ..Head::default()
    };
    for queue in &interval.queues {
        head.in_flight += queue.in_flight;
        for group in &queue.groups {
            head.iops += interval.per_second(group.total.ios);
            head.read_bytes += interval.per_second(group.read.bytes);
            head.written_bytes += interval.per_second(group.write.bytes);
        }
    }
    head
}

/// The sort key of a line, the largest first.
fn order(row: &Row, column: usize) -> f64 {
    // Disks come last.
    row.numbers
        .as_ref()
        .map_or(f64::NEG_INFINITY, COLUMNS[column].order)
}

/// The width of the widest likely screen.
const HISTORY_MAX: usize = 300;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::rates::tests::{answer, reads};

    /// A state after two samples: the groups of the tree's example were active between them.
    pub(crate) fn example() -> State {
        let (interval, lists) = tree::tests::example();
        let mut state = State {
            page: 10,
            ..State::default()
        };
        let start = Statistics {
            queues: Vec::new(),
            ..answer(1, vec![])
        };
        let end = Statistics {
            queues: interval.queues,
            ..answer(2, vec![])
        };
        for statistics in [start, end] {
            let lists = Arc::new(lists.clone());
            state.take(Sample { statistics, lists });
        }
        state
    }

    pub(crate) fn names(state: &State) -> Vec<&str> {
        state.lines.iter().map(|line| line.row.name.as_str()).collect()
    }

    #[test]
    fn first_answer_shows_what_there_is_and_no_rates() {
        let mut state = State::default();
        let statistics = answer(1000, vec![reads("/a", 1_000_000, 0)]);
        state.take(Sample {
            statistics,
            lists: Arc::default(),
        });
        assert_eq!((names(&state), state.head.iops), (vec!["q (bfq)"], 0.0));
    }

    #[test]
    fn frozen_screen_stays_and_its_history_goes_on() {
        let mut state = example();
        state.go(0);
        state.is_frozen = true;
        let later = answer(3, vec![reads("/new", 10, 0)]);
        state.take(Sample {
            statistics: later,
            lists: Arc::default(),
        });
        assert_eq!(names(&state), ["q (bfq)", "c", "a", "b", "idle"]);
        assert_eq!(
            state.history().unwrap().1,
            &VecDeque::from([0, 400, 10]).split_off(1)
        );
    }

    #[test]
    fn last_screen_of_a_lost_daemon_stays_until_the_next_one_has_rates() {
        let mut state = example();
        let before = state.head.iops;
        assert!(before > 0.0);
        state.lose("gone".to_owned());
        for (at, reads_before, wanted) in [(9, 1000, before), (10, 1070, 70.0)] {
            let statistics = answer(at, vec![reads("/c/a", reads_before, 0)]);
            state.take(Sample {
                statistics,
                lists: Arc::default(),
            });
            assert_eq!((state.head.iops, state.lost.as_deref()), (wanted, None));
        }
    }

    #[test]
    fn removed_rows_leave_no_history() {
        let mut state = example();
        let later = answer(3, vec![]);
        state.take(Sample {
            statistics: later,
            lists: Arc::default(),
        });
        assert_eq!(state.history.len(), 1);
    }
}
