//! XTS by instructions that do four blocks at once (VAES with AVX-512), with the rounds of 32 blocks under way.
//! Processors without them have the form of the parent, which says what is computed.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_aesenc_si128, _mm_aesenclast_si128, _mm_aesimc_si128, _mm_aeskeygenassist_si128,
    _mm_cvtsi128_si32, _mm_set_epi32, _mm_set_epi64x, _mm_setzero_si128, _mm_xor_si128, _mm512_aesdec_epi128,
    _mm512_aesdeclast_epi128, _mm512_aesenc_epi128, _mm512_aesenclast_epi128, _mm512_broadcast_i32x4,
    _mm512_bslli_epi128, _mm512_bsrli_epi128, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_set_epi64,
    _mm512_set1_epi64, _mm512_setzero_si512, _mm512_slli_epi64, _mm512_sllv_epi64, _mm512_srli_epi64,
    _mm512_srlv_epi64, _mm512_storeu_si512, _mm512_sub_epi64, _mm512_xor_si512,
};

use std::cell::Cell;

use crate::secret::{clear_registers, wipe_below};

use super::{BATCH_BYTES, BATCH_SECTORS, UNIT};

/// The round keys of a disk: `KEYS` is 11 for AES-128 and 15 for AES-256. There is one only where the processor has
/// the instructions.
pub(super) struct Wide<const KEYS: usize> {
    encrypt: [__m128i; KEYS],
    decrypt: [__m128i; KEYS],
    tweak: [__m128i; KEYS],
}

impl<const KEYS: usize> Wide<KEYS> {
    /// Makes the round keys of the data's key and the tweaks', of 16 or 32 bytes each. None if the processor lacks
    /// the instructions.
    pub(super) fn new(data: &[u8], tweak: &[u8]) -> Option<Self> {
        let has_all = is_x86_feature_detected!("aes")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("vaes")
            && is_x86_feature_detected!("vpclmulqdq");
        // SAFETY: the processor has the instructions, as has just been found.
        has_all.then(|| unsafe { Self::expand(data, tweak) })
    }

    /// Encrypts whole sectors of `sector` bytes from one memory into another, or in place; `number` is that of the first.
    pub(super) fn encrypt(&self, sector: usize, number: u64, from: &[Cell<u8>], into: &[Cell<u8>]) {
        // SAFETY: `new` has found that the processor has the instructions.
        unsafe { self.run::<true>(sector, number, from, into) };
        wipe_below::<FRAME_BYTES>();
    }

    /// Decrypts them in place.
    pub(super) fn decrypt(&self, sector: usize, number: u64, bytes: &[Cell<u8>]) {
        // SAFETY: `new` has found that the processor has the instructions.
        unsafe { self.run::<false>(sector, number, bytes, bytes) };
        wipe_below::<FRAME_BYTES>();
    }

    #[target_feature(enable = "aes,avx512f,avx512bw,vaes,vpclmulqdq")]
    fn expand(data: &[u8], tweak: &[u8]) -> Self {
        let encrypt = round_keys::<KEYS>(data);
        // The equivalent inverse cipher of FIPS 197, 5.3.5.
        let decrypt = std::array::from_fn(|at| match KEYS - 1 - at {
            from if from == 0 || at == 0 => encrypt[from],
            from => _mm_aesimc_si128(encrypt[from]),
        });
        Self {
            encrypt,
            decrypt,
            tweak: round_keys(tweak),
        }
    }

    /// Encrypts or decrypts. Each byte is read once, and then written.
    #[target_feature(enable = "aes,avx512f,avx512bw,vaes,vpclmulqdq")]
    fn run<const ENCRYPT: bool>(&self, sector: usize, number: u64, from: &[Cell<u8>], into: &[Cell<u8>]) {
        assert!(
            from.len().is_multiple_of(sector) && sector.is_multiple_of(WIDE_BYTES),
            "{} bytes are no sectors of {sector}",
            from.len()
        );
        assert_eq!(from.len(), into.len(), "bytes to encrypt, and their place");
        // By loops: the closure of an array's `map` is not compiled for these instructions, and is called.
        let mut keys = [_mm512_setzero_si512(); KEYS];
        for (wide, key) in keys
            .iter_mut()
            .zip(if ENCRYPT { &self.encrypt } else { &self.decrypt })
        {
            *wide = _mm512_broadcast_i32x4(*key);
        }
        let mut number = number;
        for (from, into) in from.chunks(BATCH_BYTES).zip(into.chunks(BATCH_BYTES)) {
            let firsts = self.first_tweaks(&mut number, sector, from.len() / sector);
            let sectors = from.chunks_exact(sector).zip(into.chunks_exact(sector));
            for ((from, into), first) in sectors.zip(firsts) {
                let mut tweaks = spread(first);
                let (from, _) = from.as_chunks::<WIDE_BYTES>();
                let (into, _) = into.as_chunks::<WIDE_BYTES>();
                for (at, (from, into)) in from.iter().zip(into).enumerate() {
                    if at > 0 {
                        // 32 blocks on.
                        for tweak in &mut tweaks {
                            *tweak = times_bytes::<4, 12>(*tweak);
                        }
                    }
                    convert::<KEYS, ENCRYPT>(&keys, from, into, &tweaks);
                }
            }
        }
        // The thread may do other things for long before it sleeps: no key stays in its registers, nor, by the caller, in
        // this frame, where the round keys are.
        clear_registers();
    }

    /// The tweaks of the first blocks of `count` sectors, whose rounds overlap.
    #[target_feature(enable = "aes,avx512f,avx512bw,vaes,vpclmulqdq")]
    #[inline]
    fn first_tweaks(&self, number: &mut u64, sector: usize, count: usize) -> [__m128i; BATCH_SECTORS] {
        let mut tweaks = [_mm_setzero_si128(); BATCH_SECTORS];
        let used = &mut tweaks[..count];
        for tweak in used.iter_mut() {
            *tweak = _mm_xor_si128(_mm_set_epi64x(0, number.cast_signed()), self.tweak[0]);
            *number = number.wrapping_add((sector / UNIT) as u64);
        }
        for key in &self.tweak[1..KEYS - 1] {
            for tweak in used.iter_mut() {
                *tweak = _mm_aesenc_si128(*tweak, *key);
            }
        }
        for tweak in used.iter_mut() {
            *tweak = _mm_aesenclast_si128(*tweak, self.tweak[KEYS - 1]);
        }
        tweaks
    }
}

/// Encrypts or decrypts a piece of a sector, whose tweaks are given.
#[target_feature(enable = "aes,avx512f,avx512bw,vaes,vpclmulqdq")]
#[inline]
fn convert<const KEYS: usize, const ENCRYPT: bool>(
    keys: &[__m512i; KEYS],
    from: &[Cell<u8>; WIDE_BYTES],
    into: &[Cell<u8>; WIDE_BYTES],
    tweaks: &[__m512i; WIDTH],
) {
    let (from, _) = from.as_chunks::<{ size_of::<__m512i>() }>();
    let (into, _) = into.as_chunks::<{ size_of::<__m512i>() }>();
    let mut blocks = [_mm512_setzero_si512(); WIDTH];
    for at in 0..WIDTH {
        // SAFETY: it reads the 64 cells of the array, wherever they begin.
        let block = unsafe { _mm512_loadu_si512(from[at].as_ptr().cast()) };
        blocks[at] = _mm512_xor_si512(_mm512_xor_si512(block, tweaks[at]), keys[0]);
    }
    for key in &keys[1..KEYS - 1] {
        for block in &mut blocks {
            *block = match ENCRYPT {
                true => _mm512_aesenc_epi128(*block, *key),
                false => _mm512_aesdec_epi128(*block, *key),
            };
        }
    }
    for at in 0..WIDTH {
        // The last round adds its key, and the tweak with it.
        let last = _mm512_xor_si512(keys[KEYS - 1], tweaks[at]);
        let block = match ENCRYPT {
            true => _mm512_aesenclast_epi128(blocks[at], last),
            false => _mm512_aesdeclast_epi128(blocks[at], last),
        };
        // SAFETY: it writes the 64 cells of the array, which may be written through a shared reference.
        unsafe { _mm512_storeu_si512(into[at].as_ptr().cast_mut().cast(), block) };
    }
}

/// The key expansion of FIPS 197, 5.2.
#[target_feature(enable = "aes")]
fn round_keys<const KEYS: usize>(key: &[u8]) -> [__m128i; KEYS] {
    let of_key = key.len() / 4;
    assert_eq!(of_key + 7, KEYS, "a key of {} bytes", key.len());
    let substitute = |word: u32| {
        let word = _mm_set_epi32(0, 0, word.cast_signed(), 0);
        _mm_cvtsi128_si32(_mm_aeskeygenassist_si128::<0>(word)).cast_unsigned()
    };
    let mut words = [0; 4 * WORDS_MAX];
    for (word, bytes) in words.iter_mut().zip(key.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    let mut round = 1_u32;
    for at in of_key..4 * KEYS {
        let mut word = words[at - 1];
        if at.is_multiple_of(of_key) {
            word = substitute(word).rotate_right(8) ^ round;
            // Times x in the field of the cipher: the tenth round of AES-128 comes behind 0x80.
            round = (round << 1) ^ ((round >> 7) * 0x11b);
        } else if of_key > 6 && at % of_key == 4 {
            word = substitute(word);
        }
        words[at] = words[at - of_key] ^ word;
    }
    std::array::from_fn(|at| {
        let word = |place: usize| words[4 * at + place].cast_signed();
        _mm_set_epi32(word(3), word(2), word(1), word(0))
    })
}

/// The tweaks of the first 32 blocks of a sector, four by four.
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
#[inline]
fn spread(first: __m128i) -> [__m512i; WIDTH] {
    let all = _mm512_broadcast_i32x4(first);
    // Each block's is times x what the one's before it is.
    let shift = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0);
    let back = _mm512_sub_epi64(_mm512_set1_epi64(64), shift);
    let t0 = reduce(_mm512_sllv_epi64(all, shift), _mm512_srlv_epi64(all, back));
    let t1 = times_bits::<4, 60>(t0);
    let (t2, t3) = (times_bytes::<1, 15>(t0), times_bytes::<1, 15>(t1));
    let on = |tweak| times_bytes::<2, 14>(tweak);
    [t0, t1, t2, t3, on(t0), on(t1), on(t2), on(t3)]
}

/// Times x^`LEFT`, for less than a byte; `RIGHT` is 64 less that.
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
#[inline]
fn times_bits<const LEFT: u32, const RIGHT: u32>(tweak: __m512i) -> __m512i {
    const { assert!(LEFT + RIGHT == 64) }
    reduce(
        _mm512_slli_epi64::<LEFT>(tweak),
        _mm512_srli_epi64::<RIGHT>(tweak),
    )
}

/// Adds what each half has lost by a shift: the low one's to the high one, the high one's to the low one times
/// x^7 + x^2 + x + 1, which x^128 is.
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
#[inline]
fn reduce(shifted: __m512i, over: __m512i) -> __m512i {
    let carried = _mm512_xor_si512(shifted, _mm512_bslli_epi128::<8>(over));
    _mm512_xor_si512(
        carried,
        _mm512_clmulepi64_epi128::<1>(over, _mm512_set1_epi64(X_128)),
    )
}

/// Times x^8 for each of `LEFT` bytes, at most 7; `RIGHT` is 16 less that.
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
#[inline]
fn times_bytes<const LEFT: i32, const RIGHT: i32>(tweak: __m512i) -> __m512i {
    const { assert!(LEFT + RIGHT == 16 && LEFT < 8) }
    let over = _mm512_bsrli_epi128::<RIGHT>(tweak);
    _mm512_xor_si512(
        _mm512_bslli_epi128::<LEFT>(tweak),
        _mm512_clmulepi64_epi128::<0>(over, _mm512_set1_epi64(X_128)),
    )
}

/// Registers of four blocks under way: more than a round's latency, and a quarter of what there are.
const WIDTH: usize = 8;
const WIDE_BYTES: usize = WIDTH * size_of::<__m512i>();
/// More than the frames of `run` and what it calls take: 2 KiB, most of them round keys.
const FRAME_BYTES: usize = 3 << 10;
/// Round keys at most.
const WORDS_MAX: usize = 15;
/// x^128 in the field of the tweaks.
const X_128: i64 = 0x87;
