//! A key slot: from a passphrase to the volume key. The slot's area on the disk has the volume key, split
//! into many stripes (so that a part that stays on a medium is useless) and encrypted with a key that is
//! derived from the passphrase. `header` reads slots and digests.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroize;

use crate::error::LuksError;
use crate::header::ReadAt;
use crate::kdf::{Hash, Kdf};
use crate::secret::{self, Secret};
use crate::xts::Xts;

/// The key of a disk's sectors.
#[derive(Debug)]
pub struct VolumeKey(Secret);

/// A key slot, as a header has it. Everything is checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) kdf: Kdf,
    /// Bytes of the volume key.
    pub(crate) key_bytes: usize,
    /// Bytes of the key of the area.
    pub(crate) area_key_bytes: usize,
    /// Where the area is, in bytes from the start of the header.
    pub(crate) offset: u64,
    pub(crate) stripes: u32,
    pub(crate) hash: Hash,
}

/// The key slots of a header. One that cannot be used leaves the others as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slots {
    /// In the order in which they are tried, with their names.
    usable: Vec<(String, Slot)>,
    /// Why others cannot be used, for people.
    unusable: Vec<String>,
}

/// What a header says of the right volume key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyDigest {
    pub(crate) kdf: Kdf,
    pub(crate) digest: Vec<u8>,
}

impl VolumeKey {
    /// A volume key that another process has unlocked.
    pub fn from_secret(secret: Secret) -> Self {
        Self(secret)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Another copy.
    ///
    /// # Errors
    /// If there is no locked memory.
    pub fn copy(&self) -> Result<Self, LuksError> {
        self.0.copy().map(Self).map_err(LuksError::Memory)
    }
}

impl Slots {
    /// Adds a slot behind the others.
    pub(crate) fn add(&mut self, name: impl fmt::Display, slot: Result<Slot, LuksError>) {
        match slot {
            Ok(slot) => self.usable.push((name.to_string(), slot)),
            Err(error) => self.unusable.push(unusable(&name, &error)),
        }
    }

    /// Finds the volume key that the digest accepts, in one slot after the other, while these have not cost too much.
    ///
    /// # Errors
    /// No slot opens; with those that could not be tried.
    pub(crate) fn open(
        &self,
        cost_max: u64,
        passphrase: &Secret,
        digest: &KeyDigest,
        header: &mut dyn ReadAt,
    ) -> Result<VolumeKey, LuksError> {
        let (mut untried, mut left) = (self.unusable.clone(), cost_max);
        for (name, slot) in &self.usable {
            let Some(rest) = left.checked_sub(slot.kdf.cost() + digest.kdf.cost()) else {
                untried.push(format!("slot {name}: slots before it have taken too long"));
                continue;
            };
            left = rest;
            let opened = slot.open(passphrase, header);
            match opened.and_then(|key| Ok(digest.accepts(&key)?.then_some(key))) {
                Ok(Some(key)) => return Ok(key),
                Ok(None) => {}
                Err(error) => untried.push(unusable(name, &error)),
            }
        }
        match untried.is_empty() {
            true => Err(LuksError::WrongKey),
            false => Err(LuksError::Untried(untried.join("; "))),
        }
    }
}

fn unusable(name: &dyn fmt::Display, error: &LuksError) -> String {
    format!("slot {name}: {error}")
}

impl Slot {
    /// Bytes of its area.
    pub(crate) fn area_bytes(key_bytes: usize, stripes: u32) -> usize {
        (key_bytes * stripes as usize).next_multiple_of(SECTOR)
    }

    /// Opens the slot. What comes out is the volume key only if the digest says so.
    ///
    /// # Errors
    /// If the area cannot be read, or there is no locked memory.
    pub(crate) fn open(&self, passphrase: &Secret, header: &mut dyn ReadAt) -> Result<VolumeKey, LuksError> {
        let opened = self.open_in_own_frame(passphrase, header);
        secret::wipe_stack();
        opened
    }

    /// The same, and leaves parts of keys on the stack: not in the caller's frame, which nobody wipes.
    #[inline(never)]
    fn open_in_own_frame(
        &self,
        passphrase: &Secret,
        header: &mut dyn ReadAt,
    ) -> Result<VolumeKey, LuksError> {
        let len = Self::area_bytes(self.key_bytes, self.stripes);
        let mut area = vec![0; len];
        header.read_at(self.offset, &mut area).map_err(LuksError::Read)?;
        let mut area_key = Secret::zeroed(self.area_key_bytes).map_err(LuksError::Memory)?;
        let opened = self.kdf.derive(passphrase.bytes(), area_key.bytes_mut());
        let opened = opened.and_then(|()| Xts::new(area_key.bytes(), SECTOR as u32));
        let opened = opened.and_then(|cipher| {
            cipher.decrypt(0, &mut area);
            let mut key = Secret::zeroed(self.key_bytes).map_err(LuksError::Memory)?;
            let stripes = &area[..self.key_bytes * self.stripes as usize];
            merge(stripes, self.hash, key.bytes_mut());
            Ok(VolumeKey(key))
        });
        area.zeroize();
        opened
    }
}

impl KeyDigest {
    /// Says whether this is the volume key.
    pub(crate) fn accepts(&self, key: &VolumeKey) -> Result<bool, LuksError> {
        let mut digest = vec![0; self.digest.len()];
        let derived = self.kdf.derive(key.bytes(), &mut digest);
        secret::wipe_stack();
        derived.map(|()| digest.ct_eq(&self.digest).into())
    }

    /// A digest by PBKDF2.
    pub(crate) fn new(
        hash: Hash,
        iterations: u64,
        salt: Vec<u8>,
        digest: Vec<u8>,
    ) -> Result<Self, LuksError> {
        match digest.len() {
            DIGEST_MIN..=DIGEST_MAX => match Kdf::pbkdf2(hash, iterations, salt) {
                Ok(kdf) => Ok(Self { kdf, digest }),
                Err(LuksError::Limit { name, value, max }) => Err(LuksError::damaged(format!(
                    "its digest asks for {name} {value}, more than {max}"
                ))),
                Err(other) => Err(other),
            },
            len => Err(LuksError::damaged(format!("it has a digest of {len} bytes"))),
        }
    }
}

/// Joins the stripes of a split key: each but the last is added (exclusive or) and diffused.
fn merge(stripes: &[u8], hash: Hash, key: &mut [u8]) {
    let mut stripes = stripes.chunks_exact(key.len());
    let last = stripes.next_back().expect("at least one stripe");
    key.fill(0);
    for stripe in stripes {
        add(key, stripe);
        diffuse(key, hash);
    }
    add(key, last);
}

fn add(key: &mut [u8], stripe: &[u8]) {
    key.iter_mut()
        .zip(stripe)
        .for_each(|(byte, other)| *byte ^= other);
}

/// Replaces each piece of the key, as long as a digest, by the digest of its number and itself.
fn diffuse(key: &mut [u8], hash: Hash) {
    for (number, piece) in (0_u32..).zip(key.chunks_mut(hash.len())) {
        let digest = hash.digest(&[&number.to_be_bytes(), piece]);
        let len = piece.len();
        piece.copy_from_slice(&digest.as_ref()[..len]);
    }
}

/// Areas of key slots have sectors of this size, in bytes.
const SECTOR: usize = 512;
const DIGEST_MIN: usize = 16;
const DIGEST_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a key as the specification says, with stripes that anybody can compute.
    fn split(key: &[u8], count: usize, hash: Hash) -> Vec<u8> {
        let mut stripes: Vec<u8> = (0..key.len() * (count - 1))
            .map(|at| (at * 7 % 251) as u8)
            .collect();
        let mut sum = vec![0; key.len()];
        for stripe in stripes.chunks_exact(key.len()) {
            add(&mut sum, stripe);
            diffuse(&mut sum, hash);
        }
        add(&mut sum, key);
        stripes.extend(sum);
        stripes
    }

    #[test]
    fn split_key_is_found_again_whatever_the_hash_and_the_lengths() {
        let long: Vec<u8> = (0..64).collect();
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha384, Hash::Sha512] {
            for len in [16, 32, 64] {
                let stripes = split(&long[..len], 50, hash);
                let mut key = vec![0; len];
                merge(&stripes, hash, &mut key);
                assert_eq!(key, long[..len], "{hash:?}");
            }
        }
    }

    #[test]
    fn slots_that_take_too_long_together_are_not_tried() {
        let kdf = |iterations| Kdf::pbkdf2(Hash::Sha256, iterations, vec![3; 32]).unwrap();
        let slot = |iterations| Slot {
            kdf: kdf(iterations),
            key_bytes: 32,
            area_key_bytes: 32,
            offset: 0,
            stripes: 2,
            hash: Hash::Sha256,
        };
        let digest = KeyDigest::new(Hash::Sha256, 10, vec![3; 32], vec![0; 32]).unwrap();
        let mut slots = Slots::default();
        [100, 100, 20]
            .iter()
            .enumerate()
            .for_each(|(name, cost)| slots.add(name, Ok(slot(*cost))));
        let passphrase = Secret::take(&mut [1]).unwrap();
        let refusal = |cost_max| {
            let opened = slots.open(cost_max, &passphrase, &digest, &mut &[0; 512][..]);
            opened.map(drop).unwrap_err().to_string()
        };
        assert_eq!(refusal(250), "no key slot opens with this key");
        let too_long =
            "no key slot opens with this key; not tried: slot 1: slots before it have taken too long";
        assert_eq!(refusal(219), too_long);
    }

    #[test]
    fn digest_accepts_one_key_alone() {
        let key = |bytes: &[u8]| VolumeKey(Secret::take(&mut bytes.to_vec()).unwrap());
        let salt = vec![3; 32];
        let mut digest = vec![0; 20];
        let kdf = Kdf::Pbkdf2 {
            hash: Hash::Sha256,
            iterations: std::num::NonZeroU32::MIN,
            salt: salt.clone(),
        };
        kdf.derive(&[1; 64], &mut digest).unwrap();
        let digest = KeyDigest::new(Hash::Sha256, 1, salt, digest).unwrap();
        assert!(digest.accepts(&key(&[1; 64])).unwrap());
        assert!(!digest.accepts(&key(&[2; 64])).unwrap());
    }
}
