//! Who may do what at the control socket, by the user and the groups that the kernel names of a client: the daemon's
//! user and root everything, readers ask, and a tenant asks about its group and sets the groups below it. `server` asks
//! for each connection, `methods` for each call. No tenant costs others more than its share of places, turns and lines.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use blkmq_config::diff::Change;
use blkmq_config::{Account, Control, Kind};
use blkmq_export::common::Credentials;
use blkmq_host::LogBudget;
use blkmq_host::clock::Clock;
use serde_json::{Map, Value};

use super::protocol::{Failure, NOT_ALLOWED, REFUSED};
use super::statistics::{Delay, QueueStatistics, Statistics};

/// The roles of a daemon's socket, and what their holders take of it now.
#[derive(Debug)]
pub(super) struct Roles {
    readers: Vec<Account>,
    tenants: BTreeMap<String, Vec<Account>>,
    all: AtomicU32,
    /// Connections of each user that is not an owner.
    of_users: Mutex<BTreeMap<u32, u32>>,
    /// When each tenant may change something again.
    turns: Mutex<BTreeMap<String, Instant>>,
    refusals: LogBudget,
    changes: LogBudget,
}

/// What somebody may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Everything: the daemon's user, and root.
    Owner,
    /// Ask, about everything or about these groups; and set what is below these groups.
    Listed { reads_all: bool, groups: Vec<String> },
}

/// What a method needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// A tenant is shown its part of the answer.
    Ask,
    /// The answer has no part of a tenant's.
    AskAll,
    /// The method asks what may be set.
    Set,
    /// The daemon's user.
    Own,
}

/// A client that is admitted, for as long as its connection lasts.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) peer: Credentials,
    pub(super) role: Role,
    roles: Arc<Roles>,
}

impl Roles {
    pub(super) fn new(config: &Control) -> Self {
        Self {
            readers: config.readers.clone(),
            tenants: config.tenants.clone(),
            all: AtomicU32::new(0),
            of_users: Mutex::default(),
            turns: Mutex::default(),
            refusals: LogBudget::new("refusals of the control socket"),
            changes: LogBudget::new("changes by tenants"),
        }
    }

    /// The mode of the socket: whoever is listed can connect, and is asked for.
    pub(super) fn mode(&self) -> u32 {
        match self.readers.is_empty() && self.tenants.is_empty() {
            true => 0o600,
            false => 0o666,
        }
    }

    /// Admits a client, if it has a role and there is room.
    ///
    /// # Errors
    /// What it is told.
    pub(super) fn admit(self: &Arc<Self>, client: impl AsFd) -> Result<Admitted, Failure> {
        let failed =
            |error: std::io::Error| Failure::new(REFUSED, format!("your user is not known: {error}"));
        let peer = Credentials::of_peer(&client).map_err(failed)?;
        let Some(role) = self.role_of(peer.user, || Credentials::groups_of_peer(&client)) else {
            self.note_refused(&peer, "neither in readers nor in tenants of [control]");
            let what = format!(
                "user {} may not use this socket: it is neither in readers nor in tenants of [control]",
                peer.user
            );
            return Err(Failure::new(NOT_ALLOWED, what));
        };
        // Relaxed: a count; only one thread adds.
        let (max, taken) = (role.places(), self.all.load(Ordering::Relaxed));
        if taken >= max {
            return Err(Failure::new(
                REFUSED,
                format!("{max} clients are connected already"),
            ));
        }
        if role != Role::Owner {
            let mut of_users = self.of_users.lock().unwrap_or_else(PoisonError::into_inner);
            let own = of_users.entry(peer.user).or_insert(0);
            if *own >= PER_USER_MAX {
                let what = format!(
                    "{PER_USER_MAX} clients of user {} are connected already",
                    peer.user
                );
                return Err(Failure::new(REFUSED, what));
            }
            *own += 1;
        }
        self.all.fetch_add(1, Ordering::Relaxed);
        let roles = Arc::clone(self);
        Ok(Admitted { peer, role, roles })
    }

    fn role_of(&self, user: u32, groups: impl FnOnce() -> std::io::Result<Vec<u32>>) -> Option<Role> {
        if user == ROOT || user == rustix::process::geteuid().as_raw() {
            return Some(Role::Owner);
        }
        let groups = groups().unwrap_or_default();
        let is_in = |accounts: &[Account]| accounts.iter().any(|account| account.is(user, &groups));
        let own = self.tenants.iter().filter(|(_, accounts)| is_in(accounts));
        let role = Role::Listed {
            reads_all: is_in(&self.readers),
            groups: own.map(|(path, _)| path.clone()).collect(),
        };
        (role != Role::NOBODY).then_some(role)
    }

    fn note_refused(&self, peer: &Credentials, what: &str) {
        if let Some(withheld) = self.refusals.take(Clock::get().now()) {
            tracing::warn!(client = %peer, "control: {peer} refused: {what}{withheld}");
        }
    }
}

impl Admitted {
    /// Checks that a method may be called.
    ///
    /// # Errors
    /// What the client is told. The log is told as well.
    pub(super) fn check(&self, method: &str, needs: Needs) -> Result<(), Failure> {
        let (reads_all, is_tenant) = match &self.role {
            Role::Owner => return Ok(()),
            Role::Listed { reads_all, groups } => (*reads_all, !groups.is_empty()),
        };
        let may = match needs {
            Needs::Ask => true,
            Needs::AskAll => reads_all,
            Needs::Set => is_tenant,
            Needs::Own => false,
        };
        match may {
            true => Ok(()),
            false => Err(self.refused(&format!("{method} is for {}", needs.who()))),
        }
    }

    /// Checks that a table may be set, and waits for its tenant's turn. May block for some tenths of a second.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(super) fn check_set(&self, kind: Kind, name: &str, keys: &Map<String, Value>) -> Result<(), Failure> {
        let Role::Listed { groups, .. } = &self.role else {
            return Ok(());
        };
        let own = groups
            .iter()
            .find(|own| kind == Kind::Group && is_below(name, own));
        let Some(own) = own else {
            let what = format!(
                "{} {name} is not below {}: a tenant may set groups below its own",
                kind.name(),
                groups.join(", ")
            );
            return Err(self.refused(&what));
        };
        if let Some(key) = keys.keys().find(|key| *key == LATENCY_TARGET) {
            let what =
                format!("group {name}: {key} makes other tenants give way: it is for the daemon's user");
            return Err(self.refused(&what));
        }
        self.roles.wait_for_turn(own);
        Ok(())
    }

    /// Checks the steps of a change of [`Self::check_set`].
    ///
    /// # Errors
    /// There is a step that affects others.
    pub(super) fn check_steps(&self, steps: &[Change]) -> Result<()> {
        let Role::Listed { groups, .. } = &self.role else {
            return Ok(());
        };
        for step in steps {
            let is_own = matches!(step, Change::Group(path) if groups.iter().any(|own| is_below(path, own)));
            ensure!(
                is_own,
                "{step}: it would affect others, so it is for the daemon's user: the first weight on a queue gives it another \
                 scheduler"
            );
        }
        Ok(())
    }

    /// Says that a change was made; a tenant's with its user, and no more often than its budget allows.
    pub(super) fn note_change(&self, step: &str) {
        match self.role {
            Role::Owner => tracing::info!("change: {step}"),
            Role::Listed { .. } => {
                if let Some(withheld) = self.roles.changes.take(Clock::get().now()) {
                    tracing::info!(client = %self.peer, "change by {}: {step}{withheld}", self.peer);
                }
            }
        }
    }

    /// Waits before a request is answered, so that who asks without a pause costs others little.
    pub(super) fn pace(&self) {
        if self.role.is_only_tenant() {
            thread::sleep(REQUEST_EVERY);
        }
    }

    fn refused(&self, what: &str) -> Failure {
        self.roles.note_refused(&self.peer, what);
        Failure::new(NOT_ALLOWED, format!("user {}: {what}", self.peer.user))
    }
}

impl Roles {
    fn wait_for_turn(&self, tenant: &str) {
        let now = Instant::now();
        let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = turns.get(tenant).map_or(now, |turn| now.max(*turn));
        turns.insert(tenant.to_owned(), turn + CHANGE_EVERY);
        drop(turns);
        thread::sleep(turn.saturating_duration_since(now));
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.roles.all.fetch_sub(1, Ordering::Relaxed);
        if self.role == Role::Owner {
            return;
        }
        let mut of_users = self.roles.of_users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = of_users.get_mut(&self.peer.user) {
            *own -= 1;
            if *own == 0 {
                of_users.remove(&self.peer.user);
            }
        }
    }
}

impl Role {
    const NOBODY: Self = Self::Listed {
        reads_all: false,
        groups: Vec::new(),
    };

    /// How many connections there may be before one of this role.
    fn places(&self) -> u32 {
        match self {
            Self::Owner => CLIENTS_MAX,
            Self::Listed { .. } => LISTED_MAX,
        }
    }

    /// Whether it is shown a part alone.
    pub(super) fn is_only_tenant(&self) -> bool {
        matches!(self, Self::Listed { reads_all: false, .. })
    }

    /// Whether it is shown what is in a group.
    pub(super) fn sees(&self, path: &str) -> bool {
        match self {
            Self::Owner | Self::Listed { reads_all: true, .. } => true,
            Self::Listed { groups, .. } => groups.iter().any(|own| own == path || is_below(path, own)),
        }
    }

    /// The rows of a list that it is shown, by the key that has the path of a group.
    pub(super) fn shown(&self, mut rows: Value, key: &str) -> Value {
        if let Some(rows) = rows.as_array_mut() {
            rows.retain(|row| self.sees(row[key].as_str().unwrap_or_default()));
        }
        rows
    }

    /// The statistics that it is shown: of its groups, and of their queues what concerns each tenant of these.
    pub(super) fn shown_statistics(&self, all: Statistics) -> Statistics {
        if !self.is_only_tenant() {
            return all;
        }
        let queues = all.queues.iter().filter_map(|queue| self.shown_queue(queue));
        Statistics {
            queues: queues.map(Arc::new).collect(),
            exports: Vec::new(),
            nbd_memory: Default::default(),
            ..all
        }
    }

    fn shown_queue(&self, queue: &QueueStatistics) -> Option<QueueStatistics> {
        let groups = queue.groups.iter().filter(|group| self.sees(&group.path));
        let groups: Vec<_> = groups.cloned().collect();
        // Who else is there is not told.
        let mut behind = BTreeMap::new();
        for delay in queue.delays.iter().filter(|delay| self.sees(&delay.group)) {
            let other = match self.sees(&delay.behind) {
                true => delay.behind.as_str(),
                false => "others",
            };
            *behind.entry((delay.group.as_str(), other)).or_insert(0) += delay.ns;
        }
        let delays = behind.into_iter().map(|((group, behind), ns)| Delay {
            group: group.to_owned(),
            behind: behind.to_owned(),
            ns,
        });
        (!groups.is_empty()).then(|| QueueStatistics {
            delays: delays.collect(),
            groups,
            events: BTreeMap::new(),
            ..queue.clone()
        })
    }
}

impl Needs {
    fn who(self) -> &'static str {
        match self {
            Self::Ask | Self::AskAll => "readers, and for the daemon's user",
            Self::Set => "tenants, and for the daemon's user",
            Self::Own => "the daemon's user and for root",
        }
    }
}

/// Returns whether a group is below another one.
fn is_below(path: &str, own: &str) -> bool {
    path.strip_prefix(own).is_some_and(|rest| rest.starts_with('/'))
}

const ROOT: u32 = 0;
const LATENCY_TARGET: &str = "latency_target";
/// Clients at a time.
const CLIENTS_MAX: u32 = 128;
/// Of these, how many may be taken when one comes that is no owner.
const LISTED_MAX: u32 = 96;
/// Clients at a time of one user who is no owner.
const PER_USER_MAX: u32 = 8;
/// How often a tenant may change something: while a change is made, others pay with tail latency.
const CHANGE_EVERY: Duration = Duration::from_millis(200);
/// How often a connection of a tenant may ask.
const REQUEST_EVERY: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::statistics::GroupStatistics;
    use super::*;

    fn tenant(groups: &[&str]) -> Role {
        Role::Listed {
            reads_all: false,
            groups: groups.iter().map(|&path| path.to_owned()).collect(),
        }
    }

    #[test]
    fn role_follows_from_the_user_and_its_groups() {
        let control = Control {
            readers: vec![Account::Group(20)],
            tenants: [
                ("/a".to_owned(), vec![Account::User(65001)]),
                ("/b".to_owned(), vec![Account::User(65001), Account::Group(30)]),
            ]
            .into(),
            ..Control::default()
        };
        let roles = Roles::new(&control);
        let of = |user, groups: &[u32]| roles.role_of(user, || Ok(groups.to_vec()));
        let listed = |reads_all, groups: &[&str]| {
            let groups = groups.iter().map(|&path| path.to_owned()).collect();
            Some(Role::Listed { reads_all, groups })
        };
        assert_eq!(of(0, &[]), Some(Role::Owner));
        assert_eq!(of(65001, &[]), listed(false, &["/a", "/b"]));
        assert_eq!(of(65002, &[20]), listed(true, &[]));
        assert_eq!(of(65002, &[30, 20]), listed(true, &["/b"]));
        assert_eq!(of(65002, &[31]), None);
        assert_eq!(
            (roles.mode(), Roles::new(&Control::default()).mode()),
            (0o666, 0o600)
        );
    }

    #[test]
    fn tenant_is_shown_its_own_groups_and_no_name_of_another() {
        let role = tenant(&["/a"]);
        let rows =
            json!([{"path": "/a"}, {"path": "/a/vm1"}, {"path": "/ab"}, {"path": "/b"}, {"path": null}]);
        assert_eq!(
            role.shown(rows, "path"),
            json!([{"path": "/a"}, {"path": "/a/vm1"}])
        );
        let group = |path: &str| GroupStatistics {
            path: path.to_owned(),
            ..GroupStatistics::default()
        };
        let delay = |group: &str, behind: &str, ns| Delay {
            group: group.to_owned(),
            behind: behind.to_owned(),
            ns,
        };
        let queue = |name: &str, groups: &[&str]| QueueStatistics {
            name: name.to_owned(),
            groups: groups.iter().copied().map(group).collect(),
            delays: vec![
                delay("/a/vm1", "/b", 3),
                delay("/a/vm1", "/c", 4),
                delay("/b", "/a/vm1", 5),
            ],
            events: [("requeued".to_owned(), 1)].into(),
            ..QueueStatistics::default()
        };
        let queues = vec![queue("q", &["/a/vm1", "/b"]).into(), queue("r", &["/b"]).into()];
        let all = Statistics {
            queues,
            ..Statistics::default()
        };
        let shown = role.shown_statistics(all.clone());
        assert_eq!(shown.queues.len(), 1);
        let queue = &shown.queues[0];
        assert_eq!(queue.groups, [group("/a/vm1")]);
        assert_eq!(queue.delays, [delay("/a/vm1", "others", 7)]);
        assert!(queue.events.is_empty());
        assert_eq!(Role::Owner.shown_statistics(all.clone()), all);
    }
}
