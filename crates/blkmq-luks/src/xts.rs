//! AES in XTS mode, as IEEE 1619 has it and `dm-crypt` calls it `aes-xts-plain64`: each sector by itself,
//! its number as the tweak. The mode is here, since none of the crates for it encrypts more than one block at
//! a time. The block cipher is that of the `aes` crate, or of `sys` where the processor does several blocks at
//! once.

#[cfg(target_arch = "x86_64")]
mod sys;

use std::cell::Cell;

use aes::cipher::consts::U16;
use aes::cipher::inout::InOut;
use aes::cipher::{
    Array, BlockCipherDecBackend, BlockCipherDecClosure, BlockCipherDecrypt, BlockCipherEncBackend,
    BlockCipherEncClosure, BlockCipherEncrypt, BlockSizeUser, KeyInit,
};
use aes::{Aes128, Aes256};

use crate::error::LuksError;
use crate::secret::{self, Locked};

type Block = Array<u8, U16>;

/// The cipher of a disk's sectors, with its key.
pub struct Xts {
    keys: Locked<Keys>,
    sector: usize,
}

/// The key of the data, then that of the tweaks.
#[expect(
    clippy::large_enum_variant,
    reason = "the place of each is a page, and a pointer more would cost every sector"
)]
enum Keys {
    Aes128(Aes128, Aes128),
    Aes256(Aes256, Aes256),
    #[cfg(target_arch = "x86_64")]
    Wide128(sys::Wide<11>),
    #[cfg(target_arch = "x86_64")]
    Wide256(sys::Wide<15>),
}

impl Keys {
    /// Computes the key schedules and moves them to locked memory. Its own frame has them as well, so it is one that
    /// the caller can wipe.
    #[inline(never)]
    fn locked(key: &[u8]) -> Result<Locked<Self>, LuksError> {
        let (data, tweak) = key.split_at(key.len() / 2);
        let keys = Self::new(data, tweak).ok_or_else(|| LuksError::Unsupported {
            what: format!("a key of {} bytes for aes-xts-plain64", key.len()),
            allowed: "supported are 32 and 64 bytes",
        })?;
        Locked::new(keys).map_err(LuksError::Memory)
    }

    /// Chooses the fastest form that the processor has.
    fn new(data: &[u8], tweak: &[u8]) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let wide = match data.len() {
                16 => sys::Wide::new(data, tweak).map(Self::Wide128),
                32 => sys::Wide::new(data, tweak).map(Self::Wide256),
                _ => None,
            };
            if wide.is_some() {
                return wide;
            }
        }
        Self::for_all(data, tweak)
    }

    /// The form that every processor has. None for keys of another length.
    fn for_all(data: &[u8], tweak: &[u8]) -> Option<Self> {
        match data.len() {
            16 => {
                let data = Aes128::new_from_slice(data).ok()?;
                Some(Self::Aes128(data, Aes128::new_from_slice(tweak).ok()?))
            }
            _ => {
                let data = Aes256::new_from_slice(data).ok()?;
                Some(Self::Aes256(data, Aes256::new_from_slice(tweak).ok()?))
            }
        }
    }
}

impl Xts {
    /// Makes the cipher of sectors of `sector` bytes, a power of two from 512 to 4096, with a key of 32 or 64
    /// bytes.
    ///
    /// # Errors
    /// There is no locked memory, or a key of this length cannot be used.
    pub fn new(key: &[u8], sector: u32) -> Result<Self, LuksError> {
        debug_assert!(
            sector.is_power_of_two() && (512..=SECTOR_MAX as u32).contains(&sector),
            "{sector}"
        );
        let keys = Keys::locked(key);
        secret::wipe_stack();
        Ok(Self {
            keys: keys?,
            sector: sector as usize,
        })
    }

    /// Bytes of a sector.
    pub fn sector(&self) -> u32 {
        self.sector as u32
    }

    /// Encrypts whole sectors in place. `number` is that of the first, in units of 512 bytes.
    ///
    /// # Panics
    /// `bytes` are not whole sectors.
    pub fn encrypt(&self, number: u64, bytes: &mut [u8]) {
        match &*self.keys {
            Keys::Aes128(data, tweak) => {
                self.for_each_batch(tweak, number, bytes, |batch| data.encrypt_with_backend(batch));
            }
            Keys::Aes256(data, tweak) => {
                self.for_each_batch(tweak, number, bytes, |batch| data.encrypt_with_backend(batch));
            }
            #[cfg(target_arch = "x86_64")]
            Keys::Wide128(wide) => {
                let bytes = cells(bytes);
                wide.encrypt(self.sector, number, bytes, bytes);
            }
            #[cfg(target_arch = "x86_64")]
            Keys::Wide256(wide) => {
                let bytes = cells(bytes);
                wide.encrypt(self.sector, number, bytes, bytes);
            }
        }
    }

    /// Decrypts whole sectors in place. `number` is that of the first, in units of 512 bytes.
    ///
    /// # Panics
    /// `bytes` are not whole sectors.
    pub fn decrypt(&self, number: u64, bytes: &mut [u8]) {
        match &*self.keys {
            Keys::Aes128(data, tweak) => {
                self.for_each_batch(tweak, number, bytes, |batch| data.decrypt_with_backend(batch));
            }
            Keys::Aes256(data, tweak) => {
                self.for_each_batch(tweak, number, bytes, |batch| data.decrypt_with_backend(batch));
            }
            #[cfg(target_arch = "x86_64")]
            Keys::Wide128(wide) => wide.decrypt(self.sector, number, cells(bytes)),
            #[cfg(target_arch = "x86_64")]
            Keys::Wide256(wide) => wide.decrypt(self.sector, number, cells(bytes)),
        }
    }

    /// Encrypts whole sectors from memory that others may change meanwhile, each byte of which is read once.
    ///
    /// # Panics
    /// `from` and `into` are not equally long, or not whole sectors.
    pub fn encrypt_from(&self, number: u64, from: &[Cell<u8>], into: &mut [u8]) {
        match &*self.keys {
            #[cfg(target_arch = "x86_64")]
            Keys::Wide128(wide) => wide.encrypt(self.sector, number, from, cells(into)),
            #[cfg(target_arch = "x86_64")]
            Keys::Wide256(wide) => wide.encrypt(self.sector, number, from, cells(into)),
            _ => {
                assert_eq!(from.len(), into.len(), "bytes to encrypt, and their place");
                into.iter_mut()
                    .zip(from)
                    .for_each(|(into, from)| *into = from.get());
                self.encrypt(number, into);
            }
        }
    }

    /// Decrypts whole sectors in memory that others may change meanwhile: what they change becomes noise, in units of 16
    /// bytes. On some processors a part of the plain text stays on the stack: [`secret::wipe_stack_of_sectors`].
    ///
    /// # Panics
    /// `bytes` are not whole sectors.
    pub fn decrypt_shared(&self, number: u64, bytes: &[Cell<u8>]) {
        match &*self.keys {
            #[cfg(target_arch = "x86_64")]
            Keys::Wide128(wide) => wide.decrypt(self.sector, number, bytes),
            #[cfg(target_arch = "x86_64")]
            Keys::Wide256(wide) => wide.decrypt(self.sector, number, bytes),
            _ => {
                let mut own = [0; SECTOR_MAX];
                for (at, sector) in bytes.chunks(self.sector).enumerate() {
                    let own = &mut own[..sector.len()];
                    own.iter_mut()
                        .zip(sector)
                        .for_each(|(own, from)| *own = from.get());
                    self.decrypt(number.wrapping_add((at * self.sector / UNIT) as u64), own);
                    own.iter().zip(sector).for_each(|(own, into)| into.set(*own));
                }
            }
        }
    }

    /// Passes batches of sectors with their tweaks on.
    #[inline(always)]
    fn for_each_batch(
        &self,
        tweak: &impl BlockCipherEncrypt<BlockSize = U16>,
        number: u64,
        bytes: &mut [u8],
        mut apply: impl FnMut(Batch<'_>),
    ) {
        assert!(
            bytes.len().is_multiple_of(self.sector),
            "{} bytes are no sectors of {}",
            bytes.len(),
            self.sector
        );
        let mut number = number;
        let mut tweaks = [Block::default(); BATCH_SECTORS];
        for batch in bytes.chunks_mut(BATCH_BYTES) {
            let tweaks = &mut tweaks[..batch.len() / self.sector];
            for tweak in tweaks.iter_mut() {
                *tweak = u128::from(number).to_le_bytes().into();
                number = number.wrapping_add((self.sector / UNIT) as u64);
            }
            tweak.encrypt_blocks(tweaks);
            let (blocks, _) = Block::slice_as_chunks_mut(batch);
            let blocks_of_sector = self.sector / size_of::<Block>();
            apply(Batch {
                blocks,
                tweaks,
                blocks_of_sector,
            });
        }
    }
}

fn cells(bytes: &mut [u8]) -> &[Cell<u8>] {
    Cell::from_mut(bytes).as_slice_of_cells()
}

/// Sectors that are encrypted or decrypted together, with the tweak of each one's first block.
struct Batch<'a> {
    blocks: &'a mut [Block],
    tweaks: &'a [Block],
    blocks_of_sector: usize,
}

impl Batch<'_> {
    /// Adds each block's tweak before and after the block cipher. It is compiled into the cipher's code for the
    /// processor.
    ///
    /// One block at a time: the processor overlaps the rounds of several, and finds room beside them for the
    /// tweaks, which are computed some blocks ahead. In passes over many blocks, as the cipher offers too,
    /// the tweaks' time is added to the rounds', which is slower by half where AES instructions are the limit.
    #[inline(always)]
    fn apply(self, mut cipher: impl FnMut(&mut Block)) {
        let mut ahead = [Block::default(); AHEAD];
        let mut tweaks = Tweaks {
            firsts: self.tweaks.iter(),
            blocks_of_sector: self.blocks_of_sector,
            at: 0,
            next: 0,
        };
        ahead.iter_mut().for_each(|tweak| *tweak = tweaks.next());
        for (at, block) in self.blocks.iter_mut().enumerate() {
            let tweak = std::mem::replace(&mut ahead[at % AHEAD], tweaks.next());
            add(block, &tweak);
            cipher(block);
            add(block, &tweak);
        }
    }
}

impl BlockSizeUser for Batch<'_> {
    type BlockSize = U16;
}

impl BlockCipherEncClosure for Batch<'_> {
    #[inline(always)]
    fn call<B: BlockCipherEncBackend<BlockSize = U16>>(self, backend: &B) {
        self.apply(|block| backend.encrypt_block(InOut::from(block)));
    }
}

impl BlockCipherDecClosure for Batch<'_> {
    #[inline(always)]
    fn call<B: BlockCipherDecBackend<BlockSize = U16>>(self, backend: &B) {
        self.apply(|block| backend.decrypt_block(InOut::from(block)));
    }
}

#[inline(always)]
fn add(block: &mut Block, tweak: &Block) {
    let bytes = block.0.iter_mut().zip(&tweak.0);
    bytes.for_each(|(byte, other)| *byte ^= other);
}

/// The tweaks of blocks, one after the other: within a sector, each is the one before times x, in the field of
/// 2^128 elements with x^128 = x^7 + x^2 + x + 1. Behind the last sector there are some that nobody uses.
struct Tweaks<'a> {
    firsts: std::slice::Iter<'a, Block>,
    blocks_of_sector: usize,
    at: usize,
    next: u128,
}

impl Tweaks<'_> {
    #[inline(always)]
    fn next(&mut self) -> Block {
        // A sector has a power of two of blocks.
        if self.at & (self.blocks_of_sector - 1) == 0
            && let Some(first) = self.firsts.next()
        {
            self.next = u128::from_le_bytes(first.0);
        }
        self.at += 1;
        let tweak = self.next;
        self.next = (tweak << 1) ^ ((tweak >> 127) * 0x87);
        Array(tweak.to_le_bytes())
    }
}

/// The unit of sector numbers in the tweak, in bytes, whatever a sector has.
const UNIT: usize = 512;
const BATCH_BYTES: usize = 4096;
const BATCH_SECTORS: usize = BATCH_BYTES / UNIT;
/// Blocks between the computation of a tweak and its use.
const AHEAD: usize = 8;
/// Bytes of the largest sector.
const SECTOR_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(pair).collect()
    }

    fn counting(len: usize) -> Vec<u8> {
        (0..len).map(|at| at as u8).collect()
    }

    /// A sector as IEEE 1619-2007, annex B, has it: key, number, plain text, cipher text.
    fn check(key: &str, number: u64, plain: &[u8], cipher: &str) {
        let xts = Xts::new(&bytes(key), 512).unwrap();
        let mut sector = plain.to_vec();
        xts.encrypt(number, &mut sector);
        assert_eq!(sector, bytes(cipher));
        xts.decrypt(number, &mut sector);
        assert_eq!(sector, plain);
    }

    #[test]
    fn sectors_are_encrypted_as_in_vectors_4_5_and_10_of_the_standard() {
        check(KEY_4, 0, &counting(512), CIPHER_4);
        check(KEY_4, 1, &bytes(CIPHER_4), CIPHER_5);
        check(KEY_10, 0xff, &counting(512), CIPHER_10);
    }

    #[test]
    fn sectors_that_are_encrypted_together_are_as_alone() {
        for (key, sector) in [(KEY_4, 512), (KEY_10, 512), (KEY_10, 1024), (KEY_10, 4096)] {
            let xts = Xts::new(&bytes(key), sector).unwrap();
            let sector = sector as usize;
            for count in [1, 3, 17] {
                let plain = counting(sector * count);
                let mut together = plain.clone();
                xts.encrypt(40, &mut together);
                let mut alone = plain.clone();
                for (at, one) in alone.chunks_exact_mut(sector).enumerate() {
                    xts.encrypt(40 + (at * sector / 512) as u64, one);
                }
                assert_eq!(together, alone, "{count} sectors of {sector}");
                xts.decrypt(40, &mut together);
                assert_eq!(together, plain);
            }
        }
    }

    /// The cipher in the form for all processors.
    fn for_all(key: &str, sector: usize) -> Xts {
        let key = bytes(key);
        let (data, tweak) = key.split_at(key.len() / 2);
        let keys = Locked::new(Keys::for_all(data, tweak).unwrap()).unwrap();
        Xts { keys, sector }
    }

    #[test]
    fn sectors_are_the_same_with_the_instructions_of_every_processor() {
        for (key, sector) in [(KEY_4, 512), (KEY_10, 512), (KEY_10, 2048), (KEY_10, 4096)] {
            let (fastest, for_all) = (
                Xts::new(&bytes(key), sector as u32).unwrap(),
                for_all(key, sector),
            );
            for (count, number) in [(1, 0), (3, u64::MAX), (17, 1 << 40)] {
                let plain = counting(sector * count);
                let (mut one, mut other) = (plain.clone(), plain.clone());
                fastest.encrypt(number, &mut one);
                for_all.encrypt(number, &mut other);
                assert_eq!(one, other, "{count} sectors of {sector}");
                for_all.decrypt(number, &mut one);
                fastest.decrypt(number, &mut other);
                assert_eq!((&one, &other), (&plain, &plain));
                for xts in [&fastest, &for_all] {
                    let (mut shared, mut in_place) = (plain.clone(), plain.clone());
                    fastest.encrypt(number, &mut in_place);
                    xts.encrypt_from(number, cells(&mut shared), &mut one);
                    assert_eq!(
                        (&one, &shared),
                        (&in_place, &plain),
                        "{count} sectors of {sector}"
                    );
                    xts.decrypt_shared(number, cells(&mut one));
                    assert_eq!(one, plain, "{count} sectors of {sector}");
                }
            }
        }
    }

    #[test]
    fn long_sector_is_one_chain_of_tweaks() {
        let plain = counting(4096);
        let (mut long, mut short) = (plain.clone(), plain);
        Xts::new(&bytes(KEY_10), 4096).unwrap().encrypt(7, &mut long);
        Xts::new(&bytes(KEY_10), 512).unwrap().encrypt(7, &mut short);
        assert_eq!(long[..512], short[..512]);
        assert_ne!(long[512..], short[512..]);
    }

    #[test]
    fn key_of_another_length_is_refused() {
        let error = Xts::new(&[1; 48], 512).err().unwrap();
        assert!(error.to_string().contains("a key of 48 bytes"), "{error}");
    }

    const KEY_4: &str = "2718281828459045235360287471352631415926535897932384626433832795";
    const KEY_10: &str = "\
        2718281828459045235360287471352662497757247093699959574966967627 \
        3141592653589793238462643383279502884197169399375105820974944592";
    const CIPHER_4: &str = "\
        27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89cc78cf7f5e543445f8333d8fa7f560000 \
        05279fa5d8b5e4ad40e736ddb4d35412328063fd2aab53e5ea1e0a9f332500a5df9487d07a5c92cc512c8866c7e860ce \
        93fdf166a24912b422976146ae20ce846bb7dc9ba94a767aaef20c0d61ad02655ea92dc4c4e41a8952c651d33174be51 \
        a10c421110e6d81588ede82103a252d8a750e8768defffed9122810aaeb99f9172af82b604dc4b8e51bcb08235a6f434 \
        1332e4ca60482a4ba1a03b3e65008fc5da76b70bf1690db4eae29c5f1badd03c5ccf2a55d705ddcd86d449511ceb7ec3 \
        0bf12b1fa35b913f9f747a8afd1b130e94bff94effd01a91735ca1726acd0b197c4e5b03393697e126826fb6bbde8ecc \
        1e08298516e2c9ed03ff3c1b7860f6de76d4cecd94c8119855ef5297ca67e9f3e7ff72b1e99785ca0a7e7720c5b36dc6 \
        d72cac9574c8cbbc2f801e23e56fd344b07f22154beba0f08ce8891e643ed995c94d9a69c9f1b5f499027a78572aeebd \
        74d20cc39881c213ee770b1010e4bea718846977ae119f7a023ab58cca0ad752afe656bb3c17256a9f6e9bf19fdd5a38 \
        fc82bbe872c5539edb609ef4f79c203ebb140f2e583cb2ad15b4aa5b655016a8449277dbd477ef2c8d6c017db738b18d \
        eb4a427d1923ce3ff262735779a418f20a282df920147beabe421ee5319d0568";
    const CIPHER_5: &str = "\
        264d3ca8512194fec312c8c9891f279fefdd608d0c027b60483a3fa811d65ee59d52d9e40ec5672d81532b38b6b089ce \
        951f0f9c35590b8b978d175213f329bb1c2fd30f2f7f30492a61a532a79f51d36f5e31a7c9a12c286082ff7d2394d18f \
        783e1a8e72c722caaaa52d8f065657d2631fd25bfd8e5baad6e527d763517501c68c5edc3cdd55435c532d7125c8614d \
        eed9adaa3acade5888b87bef641c4c994c8091b5bcd387f3963fb5bc37aa922fbfe3df4e5b915e6eb514717bdd2a7407 \
        9a5073f5c4bfd46adf7d282e7a393a52579d11a028da4d9cd9c77124f9648ee383b1ac763930e7162a8d37f350b2f74b \
        8472cf09902063c6b32e8c2d9290cefbd7346d1c779a0df50edcde4531da07b099c638e83a755944df2aef1aa31752fd \
        323dcb710fb4bfbb9d22b925bc3577e1b8949e729a90bbafeacf7f7879e7b1147e28ba0bae940db795a61b15ecf4df8d \
        b07b824bb062802cc98a9545bb2aaeed77cb3fc6db15dcd7d80d7d5bc406c4970a3478ada8899b329198eb61c193fb62 \
        75aa8ca340344a75a862aebe92eee1ce032fd950b47d7704a3876923b4ad62844bf4a09c4dbe8b4397184b7471360c95 \
        64880aedddb9baa4af2e75394b08cd32ff479c57a07d3eab5d54de5f9738b8d27f27a9f0ab11799d7b7ffefb2704c95c \
        6ad12c39f1e867a4b7b1d7818a4b753dfd2a89ccb45e001a03a867b187f225dd";
    const CIPHER_10: &str = "\
        1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b5d31e276f8fe4a8d66b317f9ac683f44 \
        680a86ac35adfc3345befecb4bb188fd5776926c49a3095eb108fd1098baec70aaa66999a72a82f27d848b21d4a741b0 \
        c5cd4d5fff9dac89aeba122961d03a757123e9870f8acf1000020887891429ca2a3e7a7d7df7b10355165c8b9a6d0a7d \
        e8b062c4500dc4cd120c0f7418dae3d0b5781c34803fa75421c790dfe1de1834f280d7667b327f6c8cd7557e12ac3a0f \
        93ec05c52e0493ef31a12d3d9260f79a289d6a379bc70c50841473d1a8cc81ec583e9645e07b8d9670655ba5bbcfecc6 \
        dc3966380ad8fecb17b6ba02469a020a84e18e8f84252070c13e9f1f289be54fbc481457778f616015e1327a02b140f1 \
        505eb309326d68378f8374595c849d84f4c333ec4423885143cb47bd71c5edae9be69a2ffeceb1bec9de244fbe15992b \
        11b77c040f12bd8f6a975a44a0f90c29a9abc3d4d893927284c58754cce294529f8614dcd2aba991925fedc4ae74ffac \
        6e333b93eb4aff0479da9a410e4450e0dd7ae4c6e2910900575da401fc07059f645e8b7e9bfdef33943054ff84011493 \
        c27b3429eaedb4ed5376441a77ed43851ad77f16f541dfd269d50d6a5f14fb0aab1cbb4c1550be97f7ab4066193c4caa \
        773dad38014bd2092fa755c824bb5e54c4f36ffda9fcea70b9c6e693e148c151";
}
