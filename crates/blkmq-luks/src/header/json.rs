//! The metadata of LUKS2, in JSON: key slots, segments and digests, which name each other. Numbers that may
//! exceed what JSON can have exactly are strings there. Fields that are not used here are left alone.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::{Header, Payload, check_cipher, check_key_bytes, check_stripes};
use crate::error::LuksError;
use crate::kdf::{self, Hash, Kdf};
use crate::slot::{KeyDigest, Slot, Slots};

#[derive(Deserialize)]
pub(super) struct Metadata {
    keyslots: BTreeMap<String, serde_json::Value>,
    segments: BTreeMap<String, serde_json::Value>,
    digests: BTreeMap<String, serde_json::Value>,
    config: Config,
}

#[derive(Deserialize)]
struct KeySlot {
    key_size: u64,
    af: Af,
    area: Area,
    kdf: SlotKdf,
}

#[derive(Deserialize)]
struct Af {
    #[serde(rename = "type")]
    kind: String,
    stripes: u64,
    hash: String,
}

#[derive(Deserialize)]
struct Area {
    #[serde(rename = "type")]
    kind: String,
    offset: String,
    size: String,
    encryption: String,
    key_size: u64,
}

#[derive(Deserialize)]
struct SlotKdf {
    #[serde(rename = "type")]
    kind: String,
    salt: String,
    hash: Option<String>,
    iterations: Option<u64>,
    time: Option<u64>,
    memory: Option<u64>,
    cpus: Option<u64>,
}

#[derive(Deserialize)]
struct Segment {
    offset: String,
    size: String,
    iv_tweak: String,
    encryption: String,
    sector_size: u32,
    integrity: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Digest {
    #[serde(rename = "type")]
    kind: String,
    keyslots: Vec<String>,
    segments: Vec<String>,
    hash: Option<String>,
    iterations: Option<u64>,
    salt: String,
    digest: String,
}

#[derive(Deserialize)]
struct Config {
    requirements: Option<Requirements>,
}

#[derive(Deserialize)]
struct Requirements {
    #[serde(default)]
    mandatory: Vec<String>,
}

impl Metadata {
    /// Parses the JSON of a copy, which ends at its first zero byte.
    pub(super) fn parse(json: &[u8]) -> Result<Self, LuksError> {
        let end = json.iter().position(|byte| *byte == 0).unwrap_or(json.len());
        serde_json::from_slice(&json[..end]).map_err(malformed)
    }

    /// What it says of the one segment and its key.
    pub(super) fn header(&self, uuid: String) -> Result<Header, LuksError> {
        let requirements = self.config.requirements.as_ref();
        if let Some(name) = requirements.and_then(|all| all.mandatory.first()) {
            return Err(LuksError::Unsupported {
                what: format!("the requirement {}", kdf::shown(name)),
                allowed: match name.contains("reencrypt") {
                    true => "finish a reencryption by cryptsetup reencrypt",
                    false => "supported are none",
                },
            });
        }
        let (segment_id, payload) = self.segment()?;
        // Others may be of a kind that is not known here.
        let mut digests = self.digests.values().map(Digest::deserialize);
        let digest = digests.find(|digest| {
            digest
                .as_ref()
                .is_ok_and(|digest| digest.segments.contains(segment_id))
        });
        let digest = digest.ok_or_else(|| LuksError::damaged("no digest is of its segment"))?;
        let digest = digest.map_err(malformed)?;
        Ok(Header {
            version: 2,
            uuid,
            payload,
            warning: None,
            slots: self.slots(&digest.keyslots)?,
            digest: digest.parsed()?,
        })
    }

    /// The only segment: its name and place.
    fn segment(&self) -> Result<(&String, Payload), LuksError> {
        let mut segments = self.segments.iter();
        let (Some((id, value)), None) = (segments.next(), segments.next()) else {
            return Err(LuksError::Unsupported {
                what: format!("{} segments", self.segments.len()),
                allowed: "supported is one; finish a reencryption by cryptsetup reencrypt",
            });
        };
        let kind = value
            .get("type")
            .and_then(serde_json::Value::as_str)
            .unwrap_or_default();
        if kind != "crypt" {
            return Err(LuksError::Unsupported {
                what: format!("a segment of the type {}", kdf::shown(kind)),
                allowed: "supported is crypt",
            });
        }
        let segment = Segment::deserialize(value).map_err(malformed)?;
        if segment.integrity.is_some() {
            return Err(LuksError::Unsupported {
                what: "integrity (authenticated encryption)".to_owned(),
                allowed: "format the disk without --integrity",
            });
        }
        if !matches!(segment.sector_size, 512 | 1024 | 2048 | 4096) {
            let size = segment.sector_size;
            return Err(LuksError::damaged(format!("its sectors have {size} bytes")));
        }
        check_cipher(&segment.encryption)?;
        let size = match &*segment.size {
            "dynamic" => None,
            size => Some(number(size)?),
        };
        let payload = Payload {
            offset: number(&segment.offset)?,
            size,
            sector: segment.sector_size,
            first_sector: number(&segment.iv_tweak)?,
        };
        Ok((id, payload))
    }

    /// The slots of a digest, those that are preferred first.
    fn slots(&self, ids: &[String]) -> Result<Slots, LuksError> {
        if self.keyslots.len() > SLOTS_MAX {
            let count = self.keyslots.len();
            return Err(LuksError::damaged(format!("it has {count} key slots")));
        }
        let mut found = Vec::new();
        for (id, value) in self.keyslots.iter().filter(|(id, _)| ids.contains(id)) {
            let kind = value.get("type").and_then(serde_json::Value::as_str);
            let priority = value.get("priority").and_then(serde_json::Value::as_u64);
            // Another type is for example "reencrypt", or a slot of another program's.
            if kind == Some("luks2") && priority != Some(0) {
                found.push((3 - priority.unwrap_or(1).min(2), id.len(), id, value));
            }
        }
        found.sort_by_key(|(preference, len, id, _)| (*preference, *len, *id));
        let mut slots = Slots::default();
        for (_, _, id, value) in found {
            let slot = KeySlot::deserialize(value).map_err(malformed);
            slots.add(kdf::shown(id), slot.and_then(|slot| slot.parsed()));
        }
        Ok(slots)
    }
}

impl KeySlot {
    fn parsed(&self) -> Result<Slot, LuksError> {
        if self.af.kind != "luks1" || self.area.kind != "raw" {
            return Err(LuksError::Unsupported {
                what: format!(
                    "a key slot of the types {} and {}",
                    kdf::shown(&self.af.kind),
                    kdf::shown(&self.area.kind)
                ),
                allowed: "supported are luks1 and raw",
            });
        }
        check_cipher(&self.area.encryption)?;
        let key_bytes = check_key_bytes(self.key_size)?;
        let (stripes, size) = (check_stripes(self.af.stripes)?, number(&self.area.size)?);
        if size < Slot::area_bytes(key_bytes, stripes) as u64 {
            return Err(LuksError::damaged("the area of a key slot is too small"));
        }
        Ok(Slot {
            kdf: self.kdf.parsed()?,
            key_bytes,
            area_key_bytes: check_key_bytes(self.area.key_size)?,
            offset: number(&self.area.offset)?,
            stripes,
            hash: Hash::named(&self.af.hash)?,
        })
    }
}

impl SlotKdf {
    fn parsed(&self) -> Result<Kdf, LuksError> {
        let salt = decoded(&self.salt)?;
        match &*self.kind {
            "pbkdf2" => {
                let hash = self.hash.as_deref().unwrap_or_default();
                Kdf::pbkdf2(Hash::named(hash)?, self.iterations.unwrap_or(0), salt)
            }
            kind @ ("argon2i" | "argon2id") => {
                let costs = [self.time, self.memory, self.cpus].map(|cost| cost.unwrap_or(0));
                Kdf::argon2(kind == "argon2id", costs.into(), salt)
            }
            kind => Err(LuksError::Unsupported {
                what: format!("the key derivation {}", kdf::shown(kind)),
                allowed: "supported are pbkdf2, argon2i and argon2id",
            }),
        }
    }
}

impl Digest {
    fn parsed(&self) -> Result<KeyDigest, LuksError> {
        if self.kind != "pbkdf2" {
            return Err(LuksError::Unsupported {
                what: format!("a digest of the type {}", kdf::shown(&self.kind)),
                allowed: "supported is pbkdf2",
            });
        }
        let hash = Hash::named(self.hash.as_deref().unwrap_or_default())?;
        let (salt, digest) = (decoded(&self.salt)?, decoded(&self.digest)?);
        KeyDigest::new(hash, self.iterations.unwrap_or(0), salt, digest)
    }
}

fn number(text: &str) -> Result<u64, LuksError> {
    text.parse()
        .map_err(|_| LuksError::damaged(format!("{} is no number", kdf::shown(text))))
}

fn decoded(text: &str) -> Result<Vec<u8>, LuksError> {
    STANDARD
        .decode(text)
        .map_err(|_| LuksError::damaged("a part of its JSON is no base64"))
}

fn malformed(error: serde_json::Error) -> LuksError {
    LuksError::damaged(format!(
        "its JSON, line {} column {}",
        error.line(),
        error.column()
    ))
}

/// As `cryptsetup`: each may ask for minutes.
const SLOTS_MAX: usize = 32;
