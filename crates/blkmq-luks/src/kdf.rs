//! Key derivation with bounds, and the hashes that LUKS names. A header is data from outside: what it asks
//! for in memory and time is checked before any of it is spent. `slot` and `header` call it.

use std::num::NonZeroU32;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use ring::{digest, pbkdf2};
use zeroize::Zeroize;

use crate::error::LuksError;

/// A hash that headers name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hash {
    Sha1,
    Sha256,
    Sha384,
    Sha512,
}

/// How a key is derived from a passphrase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kdf {
    Pbkdf2 {
        hash: Hash,
        iterations: NonZeroU32,
        salt: Vec<u8>,
    },
    Argon2 {
        is_id: bool,
        /// Passes over the memory.
        time: u32,
        /// In KiB.
        memory: u32,
        lanes: u32,
        salt: Vec<u8>,
    },
}

impl Hash {
    /// Finds a hash by its name in a header.
    pub(crate) fn named(name: &str) -> Result<Self, LuksError> {
        match name {
            "sha1" => Ok(Self::Sha1),
            "sha256" => Ok(Self::Sha256),
            "sha384" => Ok(Self::Sha384),
            "sha512" => Ok(Self::Sha512),
            _ => Err(LuksError::Unsupported {
                what: format!("the hash {}", shown(name)),
                allowed: "supported are sha1, sha256, sha384 and sha512",
            }),
        }
    }

    /// Bytes of a digest.
    pub(crate) fn len(self) -> usize {
        self.algorithm().output_len()
    }

    /// The digest of several parts, one after the other.
    pub(crate) fn digest(self, parts: &[&[u8]]) -> digest::Digest {
        let mut context = digest::Context::new(self.algorithm());
        parts.iter().for_each(|part| context.update(part));
        context.finish()
    }

    fn algorithm(self) -> &'static digest::Algorithm {
        match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &digest::SHA256,
            Self::Sha384 => &digest::SHA384,
            Self::Sha512 => &digest::SHA512,
        }
    }

    fn pbkdf2(self) -> pbkdf2::Algorithm {
        match self {
            Self::Sha1 => pbkdf2::PBKDF2_HMAC_SHA1,
            Self::Sha256 => pbkdf2::PBKDF2_HMAC_SHA256,
            Self::Sha384 => pbkdf2::PBKDF2_HMAC_SHA384,
            Self::Sha512 => pbkdf2::PBKDF2_HMAC_SHA512,
        }
    }
}

impl Kdf {
    /// PBKDF2 with checked parameters.
    pub(crate) fn pbkdf2(hash: Hash, iterations: u64, salt: Vec<u8>) -> Result<Self, LuksError> {
        let iterations = bounded("PBKDF2 iterations", iterations, ITERATIONS_MAX)?;
        let iterations = NonZeroU32::new(iterations)
            .ok_or_else(|| LuksError::damaged("it has no iterations of PBKDF2"))?;
        Ok(Self::Pbkdf2 {
            hash,
            iterations,
            salt: checked_salt(salt)?,
        })
    }

    /// Argon2 with checked parameters: `memory` in KiB.
    pub(crate) fn argon2(
        is_id: bool,
        (time, memory, lanes): (u64, u64, u64),
        salt: Vec<u8>,
    ) -> Result<Self, LuksError> {
        let made = Self::Argon2 {
            is_id,
            time: bounded("Argon2 passes", time, TIME_MAX)?,
            memory: bounded("Argon2 memory in KiB", memory, MEMORY_KIB_MAX)?,
            lanes: bounded("Argon2 threads", lanes, LANES_MAX)?,
            salt: checked_salt(salt)?,
        };
        let (name, value) = ("Argon2 memory in KiB times passes", time * memory);
        if value > WORK_KIB_MAX {
            let max = WORK_KIB_MAX;
            return Err(LuksError::Limit { name, value, max });
        }
        let is_sound = time > 0 && lanes > 0 && memory >= 8 * lanes;
        match is_sound {
            true => Ok(made),
            false => Err(LuksError::damaged(
                "its parameters of Argon2 contradict each other",
            )),
        }
    }

    /// What it costs: iterations, or KiB times passes. Both take about a microsecond, and less on fast processors.
    pub(crate) fn cost(&self) -> u64 {
        match self {
            Self::Pbkdf2 { iterations, .. } => iterations.get().into(),
            Self::Argon2 { time, memory, .. } => u64::from(*time) * u64::from(*memory),
        }
    }

    /// Fills `key` from a passphrase. Blocks for as long as the parameters ask, up to minutes. What it leaves on the
    /// stack, in a frame of its own, is the caller's to wipe.
    #[inline(never)]
    pub(crate) fn derive(&self, passphrase: &[u8], key: &mut [u8]) -> Result<(), LuksError> {
        match self {
            Self::Pbkdf2 {
                hash,
                iterations,
                salt,
            } => {
                pbkdf2::derive(hash.pbkdf2(), *iterations, salt, passphrase, key);
                Ok(())
            }
            Self::Argon2 {
                is_id,
                time,
                memory,
                lanes,
                salt,
            } => {
                let failed = |error: argon2::Error| LuksError::damaged(format!("Argon2: {error}"));
                let kind = if *is_id {
                    Algorithm::Argon2id
                } else {
                    Algorithm::Argon2i
                };
                let params = Params::new(*memory, *time, *lanes, Some(key.len())).map_err(failed)?;
                let count = params.block_count();
                let mut blocks: Vec<Block> = Vec::new();
                blocks.try_reserve_exact(count).map_err(|_| {
                    let what = format!("{memory} KiB of memory for Argon2 are not to be had");
                    LuksError::Read(std::io::Error::new(std::io::ErrorKind::OutOfMemory, what))
                })?;
                blocks.resize(count, Block::default());
                let argon2 = Argon2::new(kind, Version::V0x13, params);
                let derived = argon2.hash_password_into_with_memory(passphrase, salt, key, &mut blocks);
                blocks.iter_mut().for_each(Zeroize::zeroize);
                derived.map_err(failed)
            }
        }
    }
}

fn bounded(name: &'static str, value: u64, max: u64) -> Result<u32, LuksError> {
    match u32::try_from(value) {
        Ok(small) if value <= max => Ok(small),
        _ => Err(LuksError::Limit { name, value, max }),
    }
}

fn checked_salt(salt: Vec<u8>) -> Result<Vec<u8>, LuksError> {
    match salt.len() {
        SALT_MIN..=SALT_MAX => Ok(salt),
        len => Err(LuksError::damaged(format!("it has a salt of {len} bytes"))),
    }
}

/// A name from a header, for a message: short, and without control characters.
pub(crate) fn shown(name: &str) -> String {
    let short: String = name.chars().take(NAME_MAX).collect();
    format!("{short:?}")
}

/// The largest cost of one derivation: minutes of a processor.
pub(crate) const COST_MAX: u64 = 1 << 28;
/// `cryptsetup` measures some millions on a fast processor.
const ITERATIONS_MAX: u64 = COST_MAX;
/// As the most that `cryptsetup` accepts, in KiB.
const MEMORY_KIB_MAX: u64 = 4 << 20;
const TIME_MAX: u64 = 1 << 16;
const LANES_MAX: u64 = 64;
/// Memory times passes, in KiB.
const WORK_KIB_MAX: u64 = COST_MAX;
const SALT_MIN: usize = 8;
const SALT_MAX: usize = 1024;
/// Characters of a name in a message.
const NAME_MAX: usize = 64;
