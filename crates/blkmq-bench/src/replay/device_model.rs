//! A modelled drive as it is described on the command line: its kind, and keys for what differs from the
//! default.

use std::str::FromStr;

use blkmq_core::time::Nanos;
use blkmq_host::value::{self, ConfigError};
use blkmq_sim::drive::model::Model;
use blkmq_sim::modelled_queue::Spec;

/// A modelled drive: `flash` or `rotating`, and `KEY=VALUE` pairs after commas.
#[derive(Clone, Debug)]
pub(super) struct DeviceModel(pub(super) Spec);

impl FromStr for DeviceModel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let kind = words.next().unwrap_or_default();
        let mut spec = usual(kind).ok_or_else(|| {
            format!("there is no model {kind:?}: it is flash or rotating, as in flash,read=60us")
        })?;
        for word in words {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| format!("{word:?} is not KEY=VALUE, as in read=60us"))?;
            set(&mut spec, key, value).map_err(|error| error.to_string())?;
        }
        Ok(Self(spec))
    }
}

fn usual(kind: &str) -> Option<Spec> {
    match kind {
        "flash" => Some(Spec {
            model: Model::Flash {
                units: 16,
                read: Nanos::from_micros(80),
                write: Nanos::from_micros(20),
                spread: 20,
            },
            tags: 128,
        }),
        // It serves commands in the order in which they arrive, so with many commands at the drive
        // the scheduler would decide nothing.
        "rotating" => Some(Spec {
            model: Model::Rotating {
                rpm: 7200,
                seek_min: Nanos::from_micros(500),
                seek_max: Nanos::from_millis(15),
                track: 1 << 20,
            },
            tags: 2,
        }),
        _ => None,
    }
}

fn set(spec: &mut Spec, key: &str, text: &str) -> Result<(), ConfigError> {
    let number = |most, allowed| value::whole(key, text, 1..=most, allowed);
    match (key, &mut spec.model) {
        ("tags", _) => spec.tags = number(65_536, "from 1 to 65536")?,
        ("units", Model::Flash { units, .. }) => *units = number(65_536, "from 1 to 65536")?,
        ("read", Model::Flash { read, .. }) => *read = time(key, text)?,
        ("write", Model::Flash { write, .. }) => *write = time(key, text)?,
        ("spread", Model::Flash { spread, .. }) => {
            *spread = value::whole(key, text, 0..=1000, "percent, from 0 to 1000")?;
        }
        ("rpm", Model::Rotating { rpm, .. }) => *rpm = number(100_000, "from 1 to 100000")?,
        ("seek_min", Model::Rotating { seek_min, .. }) => *seek_min = time(key, text)?,
        ("seek_max", Model::Rotating { seek_max, .. }) => *seek_max = time(key, text)?,
        (_, model) => {
            let (driver, known) = match model {
                Model::Rotating { .. } => ("rotating", "rpm, seek_min, seek_max, tags"),
                _ => ("flash", "units, read, write, spread, tags"),
            };
            let key = key.to_owned();
            return Err(ConfigError::UnknownKey { driver, key, known });
        }
    }
    if let Model::Rotating {
        seek_min, seek_max, ..
    } = spec.model
        && seek_min > seek_max
    {
        let (one, other) = ("seek_min", "a shorter seek_max");
        let advice = "a seek over all tracks takes the longest; give seek_max first";
        return Err(ConfigError::Conflict { one, other, advice });
    }
    Ok(())
}

/// A time from 1 ns to 1 s: a request adds up some hundreds of them at most.
fn time(key: &str, text: &str) -> Result<Nanos, ConfigError> {
    match value::time(key, text)? {
        time if (Nanos(1)..=Nanos::from_secs(1)).contains(&time) => Ok(time),
        _ => value::bad(key, text, "a time from 1ns to 1s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_change_the_usual_drive_and_what_is_wrong_is_named() {
        let DeviceModel(spec) = "flash,read=60us,tags=8".parse().expect("a model");
        assert_eq!(spec.tags, 8);
        let Model::Flash { read, write, .. } = spec.model else {
            panic!("{spec:?}")
        };
        assert_eq!((read, write), (Nanos::from_micros(60), Nanos::from_micros(20)));
        for (text, what) in [
            ("", "there is no model \"\""),
            ("tape", "flash or rotating"),
            ("flash,fast", "\"fast\" is not KEY=VALUE"),
            (
                "flash,rpm=5400",
                "key rpm rejected: the flash driver has no such key",
            ),
            ("flash,units=0", "units=0 rejected: must be from 1 to 65536"),
            ("flash,read=0", "a time from 1ns to 1s"),
            ("rotating,read=1us", "rpm, seek_min, seek_max, tags"),
            ("rotating,seek_min=1s", "seek_min does not go together with"),
        ] {
            let error = text.parse::<DeviceModel>().expect_err(text);
            assert!(error.contains(what), "{text}: {error}");
        }
    }
}
