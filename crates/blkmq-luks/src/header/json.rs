//! The metadata of LUKS2, in JSON: key slots, segments and digests, which name each other. Numbers that may
//! exceed what JSON can have exactly are strings there. Fields that are not used here are left alone.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::{Header, Payload, check_cipher, check_stripes};
use crate::error::LuksError;
use crate::kdf::{self, Hash, Kdf};
use crate::slot::{KeyDigest, Slot};

#[derive(Deserialize)]
pub(super) struct Metadata {
    keyslots: BTreeMap<String, serde_json::Value>,
    segments: BTreeMap<String, serde_json::Value>,
    digests: BTreeMap<String, Digest>,
    config: Config,
}

#[derive(Deserialize)]
struct KeySlot {
    key_size: u64,
    priority: Option<u8>,
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
                allowed: "finish a reencryption by cryptsetup reencrypt",
            });
        }
        let (segment_id, payload, cipher) = self.segment()?;
        let named = |digest: &&Digest| digest.segments.contains(segment_id);
        let digest = self.digests.values().find(named);
        let digest = digest.ok_or_else(|| LuksError::damaged("no digest is of its segment"))?;
        let (slots, key_bytes) = self.slots(&digest.keyslots, cipher)?;
        Ok(Header {
            version: 2,
            uuid,
            payload,
            warning: None,
            slots,
            digest: digest.parsed()?,
            key_bytes,
        })
    }

    /// The only segment: its name, place and cipher.
    fn segment(&self) -> Result<(&String, Payload, String), LuksError> {
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
        Ok((id, payload, segment.encryption))
    }

    /// The slots of a digest, those that are preferred first, and the length of the volume key.
    fn slots(&self, ids: &[String], cipher: String) -> Result<(Vec<Slot>, usize), LuksError> {
        let mut slots = Vec::new();
        let mut key_size = None;
        for (id, value) in self.keyslots.iter().filter(|(id, _)| ids.contains(id)) {
            let kind = value.get("type").and_then(serde_json::Value::as_str);
            if kind != Some("luks2") {
                // For example "reencrypt", or a slot of another program's.
                continue;
            }
            let slot = KeySlot::deserialize(value).map_err(malformed)?;
            key_size = key_size.or(Some(slot.key_size));
            if slot.priority != Some(0) {
                slots.push((3 - slot.priority.unwrap_or(1).min(2), id.len(), id, slot));
            }
        }
        // Without a slot, only the length of the key is unknown, and nothing can be opened.
        let key_bytes = check_cipher(&cipher, key_size.unwrap_or(64))?;
        slots.sort_by(|one, other| (one.0, one.1, one.2).cmp(&(other.0, other.1, other.2)));
        let parsed = slots.iter().map(|(.., slot)| slot.parsed(key_bytes));
        Ok((parsed.collect::<Result<_, _>>()?, key_bytes))
    }
}

impl KeySlot {
    fn parsed(&self, key_bytes: usize) -> Result<Slot, LuksError> {
        if self.key_size != key_bytes as u64 {
            return Err(LuksError::damaged("its key slots have keys of different lengths"));
        }
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
        let (stripes, size) = (check_stripes(self.af.stripes)?, number(&self.area.size)?);
        if size < Slot::area_bytes(key_bytes, stripes) as u64 {
            return Err(LuksError::damaged("the area of a key slot is too small"));
        }
        Ok(Slot {
            kdf: self.kdf.parsed()?,
            key_bytes,
            area_key_bytes: check_cipher(&self.area.encryption, self.area.key_size)?,
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
