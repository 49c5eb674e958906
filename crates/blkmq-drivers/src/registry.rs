//! The registry of drivers: those that disks can name. A new driver needs its folder, one line here and a
//! page in `docs/drivers`.
//!
//! Disks that lie on other disks are no drivers: `linear`, `striped` and `multipath` refer to disks
//! by name, so the code that knows all disks (`blkmq_config::disk`) parses and plans these three.

use crate::driver::Driver;

/// The drivers of this crate, in the order in which messages list them.
static BUILT_IN: &[&Driver] = &[
    #[cfg(feature = "file")]
    &crate::file::DRIVER,
    #[cfg(feature = "qcow2")]
    &crate::qcow2::DRIVER,
    #[cfg(feature = "ram")]
    &crate::ram::DRIVER,
    #[cfg(feature = "null")]
    &crate::null::DRIVER,
    #[cfg(feature = "nbd")]
    &crate::nbd::DRIVER,
    #[cfg(feature = "rbd")]
    &crate::rbd::DRIVER,
];

/// The drivers that disks can name. By default those of this crate.
#[derive(Clone, Debug)]
pub struct Registry(Vec<&'static Driver>);

impl Default for Registry {
    fn default() -> Self {
        Self(BUILT_IN.to_vec())
    }
}

impl Registry {
    /// Adds a driver, which is listed behind those of this crate.
    ///
    /// # Panics
    /// A driver of that name exists: the caller has used a name that is not its own.
    #[must_use]
    pub fn with(mut self, driver: &'static Driver) -> Self {
        assert!(
            self.get(driver.name).is_none(),
            "a driver {} is listed",
            driver.name
        );
        self.0.push(driver);
        self
    }

    /// Finds a driver by its name.
    pub fn get(&self, name: &str) -> Option<&'static Driver> {
        self.iter().find(|driver| driver.name == name)
    }

    /// All drivers, in order.
    pub fn iter(&self) -> impl Iterator<Item = &'static Driver> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DiskRequest;

    /// Its keys, as the message for an unknown key lists them.
    fn known(driver: &Driver) -> Vec<String> {
        let given = [(driver.name, "nbd://x/"), ("no-such-key", "1")];
        let given = given.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let sized = [(driver.name, "1M"), ("no-such-key", "1")];
        let sized = sized.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let parse = |pairs: &[(String, String)]| {
            let mut pairs = pairs.to_vec().into();
            (driver.parse)(&mut pairs, &DiskRequest::default()).expect_err("an unknown key")
        };
        let texts = [parse(&given).to_string(), parse(&sized).to_string()];
        let text = texts
            .iter()
            .find_map(|text| text.split_once("no such key; it has "));
        let list = text.unwrap_or_else(|| panic!("{texts:?}")).1;
        let names = list.split(", ").map(str::to_owned);
        names.filter(|key| key != driver.name).collect()
    }

    #[test]
    fn keys_that_are_listed_are_those_that_are_taken() {
        for driver in Registry::default().iter() {
            let mut listed: Vec<&str> = driver.keys.iter().map(|key| key.name).collect();
            let mut taken = known(driver);
            listed.sort_unstable();
            taken.sort_unstable();
            assert_eq!(listed, taken, "{}", driver.name);
        }
    }

    #[test]
    fn every_driver_has_a_page_with_every_key() {
        for driver in Registry::default().iter() {
            let pages = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/drivers");
            let page = std::fs::read_to_string(format!("{pages}/{}.md", driver.name)).unwrap();
            for key in driver.keys.iter().map(|key| key.name).chain([driver.name]) {
                assert!(page.contains(&format!("| `{key}` |")), "{}: {key}", driver.name);
            }
        }
    }
}
