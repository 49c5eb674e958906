//! The keys of a disk on their way to its driver: pairs of texts, from which each is taken once.
//! `blkmq-config` fills the list and takes the keys of every disk; the rest is the driver's.

use blkmq_host::value::{self, ConfigError};

/// Keys with their values, in the order in which they were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pairs(Vec<(String, String)>);

impl Pairs {
    /// Returns whether a key is given.
    pub fn has(&self, key: &str) -> bool {
        self.0.iter().any(|pair| pair.0 == key)
    }

    /// Takes a key out of the list.
    ///
    /// # Errors
    /// It is given twice.
    pub fn take(&mut self, key: &str) -> Result<Option<String>, ConfigError> {
        let Some(at) = self.0.iter().position(|pair| pair.0 == key) else {
            return Ok(None);
        };
        let (_, value) = self.0.remove(at);
        if self.has(key) {
            return Err(ConfigError::Twice { key: key.to_owned() });
        }
        Ok(Some(value))
    }

    /// Takes a size of at least one byte, which a disk without a medium has instead of a location.
    /// Empty text counts as a missing key.
    ///
    /// # Errors
    /// It is no size, 0, or given twice.
    pub fn take_size(&mut self, key: &str) -> Result<u64, ConfigError> {
        let text = self.take(key)?.unwrap_or_default();
        match value::size(key, &text)? {
            0 => Err(ConfigError::Refused {
                key: key.to_owned(),
                value: text,
                why: "a disk has at least one block, 512 bytes".to_owned(),
            }),
            size => Ok(size),
        }
    }

    /// Passes each remaining key to `set`, in order, and leaves none.
    ///
    /// # Errors
    /// The first key that `set` refuses, or that is given twice.
    pub fn set_all(
        &mut self,
        mut set: impl FnMut(&str, &str) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        while let Some(key) = self.first().map(str::to_owned) {
            let value = self.take(&key)?.expect("it is the first");
            set(&key, &value)?;
        }
        Ok(())
    }

    /// The first remaining key.
    pub fn first(&self) -> Option<&str> {
        self.0.first().map(|pair| pair.0.as_str())
    }
}

impl From<Vec<(String, String)>> for Pairs {
    fn from(pairs: Vec<(String, String)>) -> Self {
        Self(pairs)
    }
}

/// Checks the size of a disk whose content is kept in memory.
///
/// # Errors
/// It is too large; `key` is the key that asks for the memory.
#[cfg(any(feature = "null", feature = "ram"))]
pub(crate) fn fits_memory(key: &str, size: u64) -> Result<(), ConfigError> {
    if size > MEMORY_MAX {
        return Err(ConfigError::Refused {
            key: key.to_owned(),
            value: size.to_string(),
            why: "must be at most 1T, since the table of its pieces takes memory at once".to_owned(),
        });
    }
    Ok(())
}

/// The largest disk in memory, in bytes.
#[cfg(any(feature = "null", feature = "ram"))]
const MEMORY_MAX: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Pairs {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        list.iter().map(owned).collect::<Vec<_>>().into()
    }

    #[test]
    fn key_is_taken_once_and_refused_twice() {
        let mut list = pairs(&[("a", "1"), ("b", "2"), ("b", "3")]);
        assert_eq!(list.take("a"), Ok(Some("1".to_owned())));
        assert_eq!(list.take("a"), Ok(None));
        let error = list.take("b").unwrap_err().to_string();
        assert_eq!(error, "b= is given twice: keep one");
    }

    #[test]
    fn disk_has_at_least_one_byte() {
        let error = pairs(&[("ram", "0")]).take_size("ram").unwrap_err().to_string();
        assert_eq!(error, "ram=0 rejected: a disk has at least one block, 512 bytes");
        assert_eq!(pairs(&[("ram", "4K")]).take_size("ram"), Ok(4096));
    }
}
