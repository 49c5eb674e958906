//! The elevators that a queue can have: what each says of itself, and the list of them. `queue` and
//! `blkmq-config` use nothing else of an elevator before it is built; [`super::Elevator`] is what it does then.

use std::fmt;
use std::hash::{Hash, Hasher};

use super::{BUILT_IN, Elevator, TunableError};
use crate::group::GroupTree;
use crate::limits::Limits;

/// An elevator, as it is listed: Linux's `elevator_type`. Its name stands for it, so two are equal if their names
/// are.
pub struct ElevatorType {
    /// The name under which users choose it.
    pub name: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// Whether it divides the drive among groups by their weights. Then requests are issued in its order, without
    /// shares of the tags for disks; a latency target holds nobody back whom it lets go first
    /// ([`super::GroupAware::dispatch_urgent`]).
    pub knows_groups: bool,
    /// Makes it; nothing for `none`, with which requests go directly to the submitter's hardware context.
    pub build: Option<Build>,
}

/// Makes an elevator.
pub type Build = fn(&Setup<'_>) -> Box<dyn Elevator>;

/// What an elevator is made for.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    /// The drive's limits: merges stay within them.
    pub limits: &'a Limits,
    /// The most requests that it holds at a time, those in flight included.
    pub requests_max: usize,
    /// The groups; the tree can grow to its capacity.
    pub groups: &'a GroupTree,
}

impl ElevatorType {
    /// Makes the elevator; `none` has none.
    pub fn build(&self, setup: &Setup<'_>) -> Option<Box<dyn Elevator>> {
        self.build.map(|build| build(setup))
    }

    /// Lists the tunables of one for a drive of these limits, with their defaults.
    pub fn tunables(&self, limits: &Limits) -> Vec<(&'static str, u64)> {
        let sample = self.sample(limits);
        sample.map_or_else(Vec::new, |elevator| elevator.tunables())
    }

    /// Checks names and values of tunables, before a queue has the elevator.
    ///
    /// # Errors
    /// The first name or value that it refuses.
    pub fn check_tunables<'a>(
        &self,
        tunables: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Result<(), TunableError> {
        let mut tunables = tunables.into_iter().peekable();
        if tunables.peek().is_none() {
            return Ok(());
        }
        let mut sample = self.sample(&Limits::default());
        tunables.try_for_each(|(name, value)| match &mut sample {
            Some(elevator) => elevator.set_tunable(name, value),
            None => Err(TunableError::unknown(self.name, name)),
        })
    }

    /// A small one, which no queue has.
    fn sample(&self, limits: &Limits) -> Option<Box<dyn Elevator>> {
        self.build(&Setup {
            limits,
            requests_max: 1,
            groups: &GroupTree::flat(1),
        })
    }

    /// Whether requests go through an elevator.
    pub const fn is_some(&self) -> bool {
        self.build.is_some()
    }
}

impl PartialEq for ElevatorType {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for ElevatorType {}

impl Hash for ElevatorType {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Display for ElevatorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl fmt::Debug for ElevatorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Default for &'static ElevatorType {
    fn default() -> Self {
        super::NONE
    }
}

/// The elevators that users can choose. By default those of this crate.
#[derive(Clone, Debug)]
pub struct Registry(Vec<&'static ElevatorType>);

impl Default for Registry {
    fn default() -> Self {
        Self(BUILT_IN.to_vec())
    }
}

impl Registry {
    /// Adds an elevator, which is listed behind those of this crate.
    ///
    /// # Panics
    /// An elevator of that name exists: the caller has used a name that is not its own.
    #[must_use]
    pub fn with(mut self, elevator: &'static ElevatorType) -> Self {
        assert!(
            self.get(elevator.name).is_none(),
            "an elevator {elevator} is listed"
        );
        self.0.push(elevator);
        self
    }

    /// Finds an elevator by its name.
    pub fn get(&self, name: &str) -> Option<&'static ElevatorType> {
        self.iter().find(|elevator| elevator.name == name)
    }

    /// Finds an elevator by the name that a user has given.
    ///
    /// # Errors
    /// There is none; the text says which there are.
    pub fn choose(&self, name: &str) -> Result<&'static ElevatorType, UnknownElevator> {
        self.get(name).ok_or_else(|| UnknownElevator(self.names()))
    }

    /// All elevators, in order.
    pub fn iter(&self) -> impl Iterator<Item = &'static ElevatorType> {
        self.0.iter().copied()
    }

    /// All names, for messages, as in `none, bfq`.
    pub fn names(&self) -> String {
        let names: Vec<&str> = self.iter().map(|elevator| elevator.name).collect();
        names.join(", ")
    }
}

/// A name that no elevator has; displayed as the names that there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownElevator(String);

impl fmt::Display for UnknownElevator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "must be one of {}", self.0)
    }
}

impl std::error::Error for UnknownElevator {}

#[cfg(test)]
mod tests {
    use super::*;

    static OTHER: ElevatorType = ElevatorType {
        name: "other",
        help: "as none",
        knows_groups: false,
        build: None,
    };

    #[test]
    fn elevator_has_the_name_under_which_it_is_listed() {
        let setup = Setup {
            limits: &Limits::default(),
            requests_max: 4,
            groups: &GroupTree::flat(2),
        };
        for listed in BUILT_IN {
            let built = listed.build(&setup);
            assert_eq!(built.is_some(), listed.is_some(), "{listed}");
            let name = built.map_or("none", |elevator| elevator.name());
            assert_eq!(name, listed.name);
        }
    }

    #[test]
    fn tunables_are_known_and_checked_before_a_queue_has_the_elevator() {
        for kind in BUILT_IN {
            let defaults = kind.tunables(&Limits::default());
            assert_eq!(kind.check_tunables(defaults.iter().copied()), Ok(()), "{kind}");
            let unknown = kind.check_tunables([("slice_idel", 0)]).unwrap_err();
            assert_eq!(unknown.to_string(), format!("{kind} has no tunable slice_idel"));
            for (name, _) in defaults {
                assert!(kind.check_tunables([(name, u64::MAX)]).is_err(), "{kind} {name}");
            }
        }
    }

    #[test]
    fn added_elevator_is_found_and_listed_last() {
        let registry = Registry::default().with(&OTHER);
        assert_eq!(registry.get("other"), Some(&OTHER));
        let built_in = Registry::default().names();
        assert_eq!(registry.names(), format!("{built_in}, other"));
        let error = Registry::default().choose("other").unwrap_err();
        assert_eq!(error.to_string(), format!("must be one of {built_in}"));
    }

    #[test]
    #[should_panic(expected = "an elevator other is listed")]
    fn elevator_with_the_name_of_another_is_refused() {
        let _ = Registry::default().with(&OTHER).with(&OTHER);
    }
}
