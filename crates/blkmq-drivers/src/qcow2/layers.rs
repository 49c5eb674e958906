//! Reads through a chain of images: where a range of a disk is, and its bytes. `tables` knows it of one image; `chain`
//! has what is below.

use std::io::{self, Read};
use std::sync::Arc;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use ruzstd::decoding::StreamingDecoder;

use super::chain::Base;
use super::header::Compression;
use super::tables::{Packed, Place, Tables};
use super::transfer::{self, Buffer};
use crate::file::FileDisk;

/// Where a range of a disk is, whichever image of the chain has it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mapping<'a> {
    /// From this byte of a file on. It may be written there if it `is_own`.
    Data {
        file: &'a Arc<FileDisk>,
        host: u64,
        is_own: bool,
    },
    /// Nowhere: it reads as zeroes.
    Zero,
    /// In a compressed cluster of a file, from byte `skip` of its content on.
    Packed {
        file: &'a FileDisk,
        packed: Packed,
        cluster: u64,
        skip: u64,
    },
}

/// Finds where the byte `at` of the disk is, and for how many bytes, at most `len`, that goes on. Blocks.
///
/// # Errors
/// The system's, or an image is corrupt there.
pub(super) fn look_up<'a>(
    tables: &'a Tables,
    below: Option<&'a Arc<Base>>,
    at: u64,
    len: u64,
) -> io::Result<(Mapping<'a>, u64)> {
    let (place, known) = tables.look_up(at, len)?;
    let mapping = match place {
        Place::Below => return look_up_below(below, at, known),
        Place::Zero { .. } => Mapping::Zero,
        Place::Data { host, is_own } => Mapping::Data {
            file: tables.data_file(),
            host,
            is_own,
        },
        Place::Packed(packed) => Mapping::Packed {
            file: tables.data_file(),
            packed,
            cluster: tables.cluster(),
            skip: at % tables.cluster(),
        },
    };
    Ok((mapping, known))
}

/// The same of what is below an image. Nobody writes there.
pub(super) fn look_up_below(below: Option<&Arc<Base>>, at: u64, len: u64) -> io::Result<(Mapping<'_>, u64)> {
    let Some(base) = below.filter(|base| at < base.size) else {
        return Ok((Mapping::Zero, len));
    };
    let len = len.min(base.size - at);
    let Some(tables) = base.tables()? else {
        let data = Mapping::Data {
            file: &base.disk,
            host: at,
            is_own: false,
        };
        return Ok((data, len));
    };
    Ok(match look_up(tables, base.below.as_ref(), at, len)? {
        (Mapping::Data { file, host, .. }, known) => {
            let is_own = false;
            (Mapping::Data { file, host, is_own }, known)
        }
        other => other,
    })
}

/// Returns whether a range of what is below an image reads as zeroes, as far as tables say.
///
/// # Errors
/// As of [`look_up`].
pub(super) fn is_zero_below(below: Option<&Arc<Base>>, at: u64, len: u64) -> io::Result<bool> {
    let mut done = 0;
    while done < len {
        match look_up_below(below, at + done, len - done)? {
            (Mapping::Zero, known) => done += known.max(1),
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// Reads a range, piece by piece, from where `find` says that it is.
///
/// # Errors
/// That of `find`, or the system's.
pub(super) fn read_by<'a>(
    at: u64,
    mut into: &mut [u8],
    find: impl Fn(u64, u64) -> io::Result<(Mapping<'a>, u64)>,
) -> io::Result<()> {
    let mut at = at;
    while !into.is_empty() {
        let (mapping, known) = find(at, into.len() as u64)?;
        let (part, rest) = into.split_at_mut(known.max(1) as usize);
        mapping.read(part)?;
        (at, into) = (at + part.len() as u64, rest);
    }
    Ok(())
}

impl Mapping<'_> {
    /// Returns whether it reads as zeroes, as far as tables say, and holes of files below the image; and for how many bytes,
    /// at most `len`, that holds.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn reads_as_zeroes(&self, len: u64) -> io::Result<(bool, u64)> {
        match self {
            Self::Zero => Ok((true, len)),
            Self::Data {
                file,
                host,
                is_own: false,
            } => file.look_for_hole(*host, len),
            Self::Data { .. } | Self::Packed { .. } => Ok((false, len)),
        }
    }

    fn read(&self, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Zero => into.fill(0),
            Self::Data { file, host, .. } => transfer::read(file, *host, into)?,
            Self::Packed {
                file,
                packed,
                cluster,
                skip,
            } => {
                let content = unpack(file, *packed, *cluster)?;
                let skip = *skip as usize;
                into.copy_from_slice(&content[skip..skip + into.len()]);
            }
        }
        Ok(())
    }
}

/// Reads a compressed cluster of `cluster` bytes. Blocks.
///
/// # Errors
/// The system's, or it is corrupt.
pub(super) fn unpack(file: &FileDisk, packed: Packed, cluster: u64) -> io::Result<Buffer> {
    let mut raw = Buffer::new(packed.len as usize)?;
    transfer::read(file, packed.host, &mut raw)?;
    let mut content = Buffer::new(cluster as usize)?;
    let is_whole = match packed.compression {
        Compression::Deflate => inflate(&raw, &mut content),
        Compression::Zstd => decompress_zstd(&raw, &mut content),
    };
    match is_whole {
        true => Ok(content),
        false => {
            let what = format!("the compressed cluster at byte {} is corrupt", packed.host);
            Err(io::Error::new(io::ErrorKind::InvalidData, what))
        }
    }
}

/// Returns whether all of `content` was there. What follows in the last sector is another's.
fn inflate(raw: &[u8], content: &mut [u8]) -> bool {
    let mut state = Box::<DecompressorOxide>::default();
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = decompress(&mut state, raw, content, 0, flags);
    matches!(status, TINFLStatus::Done | TINFLStatus::HasMoreOutput) && written == content.len()
}

/// The same of a frame of zstd (RFC 8878).
fn decompress_zstd(raw: &[u8], content: &mut [u8]) -> bool {
    let decoder = StreamingDecoder::new_with_max_window_size(raw, ZSTD_WINDOW_MAX);
    decoder.is_ok_and(|mut decoder| decoder.read_exact(content).is_ok())
}

/// Most memory that a hostile frame has a decoder take, in bytes: RFC 8878 has all decoders support as much.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;
