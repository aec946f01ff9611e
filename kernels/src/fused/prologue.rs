//! [`Prologue`]: what a cast makes of x and of what it reads beside it, before it casts that. Nothing of it is written.
//!
//! ```text
//! SwiGLU     x σ(x) up           up [rows, cols], which lies as x does
//! RMSNorm    x r γ               r [rows], f32, and γ [cols], in x's dtype or f32
//! ```
//! Rounded to x's dtype: the bits that [`swiglu`](super::swiglu()) and [`rms_norm`](super::rms_norm()) write.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::swiglu::swiglu_words;
use super::{Dense, FusedKernel, gamma_of, packed, unpacked};
use crate::denylist::is_disabled;
use crate::load::{Geometry, SECTOR_WORDS, all_loaded, load_pinned, load_sector, load_vector};
use crate::ptx::cvt::Isa;
use crate::source::Source;
use crate::view::Checked;
use crate::{KernelError, MatrixView, VectorView, supports};

/// What [`quantize_fused`](crate::quantize_fused) makes the tensor of that it casts.
#[derive(Clone, Copy, Debug)]
pub enum FusedInputs<'a> {
    /// What [`swiglu`](super::swiglu()) reads.
    SwiGlu {
        /// The gate.
        a: &'a MatrixView,
        /// Up.
        b: &'a MatrixView,
    },
    /// What [`rms_norm`](super::rms_norm()) reads.
    RmsNorm {
        /// `[rows, cols]`.
        x: &'a MatrixView,
        /// `[1, cols]`, in x's dtype or f32.
        gamma: &'a MatrixView,
        /// What [`inverse_rms`](super::inverse_rms) has made of x, f32 `[rows]`.
        inverse_rms: &'a Handle,
    },
}

impl<'a> FusedInputs<'a> {
    /// The tensor whose shape, dtype and layout the result has.
    pub(crate) fn first(&self) -> &'a MatrixView {
        match self {
            Self::SwiGlu { a, .. } => a,
            Self::RmsNorm { x, .. } => x,
        }
    }

    /// The first tensor and what is read beside it, if a cast may make this here.
    pub(crate) fn check<R: Runtime>(&self, client: &ComputeClient<R>) -> Result<(Checked, Beside), KernelError> {
        let dtype = self.first().dtype;
        if !packs(client, dtype) {
            return Err(KernelError::UnsupportedDtype { dtype });
        }
        match *self {
            Self::SwiGlu { a, b } => {
                let [a, b] = Dense::new(client, FusedKernel::SwiGluCast, [a, b])?.tensors;
                let ([(_, a_base), (_, b_base)], size) = ([a.memory(), b.memory()], a.source.size());
                if a_base != b_base {
                    return Err(KernelError::Misaligned { offset: (b_base * size) as u64, size });
                }
                Ok((a, Beside::SwiGlu { up: b }))
            }
            Self::RmsNorm { x, gamma, inverse_rms } => {
                let Dense { tensors: [gamma], dtype: of_gamma, .. } =
                    gamma_of(client, FusedKernel::RmsNormCast, x, gamma)?;
                if !fits_gamma(dtype, of_gamma) {
                    return Err(KernelError::UnsupportedDtype { dtype: of_gamma });
                }
                let [x] = Dense::new(client, FusedKernel::RmsNormCast, [x])?.tensors;
                let inverse = VectorView { handle: inverse_rms.clone(), len: x.rows, stride: 1, dtype: f32_type() };
                Ok((x, Beside::RmsNorm { inverse: Checked::vector(client, &inverse)?, gamma }))
            }
        }
    }
}

/// Whether a cast is to make what this operation, SwiGLU or RMSNorm, makes of two tensors of these dtypes, by
/// [`quantize_fused`](crate::quantize_fused): not on a CPU, nor where that or the operation was found to be wrong.
pub fn casts_fused<R: Runtime>(
    client: &ComputeClient<R>,
    kernel: FusedKernel,
    [dtype, other]: [StorageType; 2],
) -> bool {
    let (cast, fits) = match kernel {
        FusedKernel::SwiGlu => (FusedKernel::SwiGluCast, other == dtype),
        FusedKernel::RmsNorm => (FusedKernel::RmsNormCast, fits_gamma(dtype, other)),
        _ => return false,
    };
    let is_cpu = client.properties().hardware.num_cpu_cores.is_some();
    !is_cpu && fits && packs(client, dtype) && ![kernel, cast].into_iter().any(|kernel| is_disabled(client, kernel))
}

/// Whether a cast takes γ of this dtype beside x of the other.
fn fits_gamma(x: StorageType, gamma: StorageType) -> bool {
    gamma == x || gamma == f32_type()
}

fn f32_type() -> StorageType {
    f32::as_type_native_unchecked().storage_type()
}

/// Whether elements of this dtype can be rounded in registers: WGSL has no words of 16-bit floats.
fn packs<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    supports(client, dtype) && (dtype.size() == 4 || Isa::of(client).has_ptx())
}

/// Checked tensors that a cast reads beside x.
#[derive(Clone, Debug)]
pub(crate) enum Beside {
    /// x is what is cast.
    Nothing,
    SwiGlu {
        /// Lies as x does.
        up: Checked,
    },
    RmsNorm {
        inverse: Checked,
        gamma: Checked,
    },
}

impl Beside {
    /// [`Checked::vector_words`] of all tensors that are loaded by vectors.
    pub(crate) fn vector_words(&self, x: &Checked) -> usize {
        match self {
            Self::RmsNorm { gamma, .. } => x.vector_words().min(gamma.vector_words()),
            _ => x.vector_words(),
        }
    }

    /// The kernel's argument.
    pub(crate) fn arg<N: Size, R: Runtime>(&self) -> PrologueArgs<N, R> {
        match self {
            Self::Nothing => PrologueArgs::Nothing,
            Self::SwiGlu { up } => PrologueArgs::SwiGlu(up.array()),
            Self::RmsNorm { inverse, gamma } => {
                let base = inverse.memory().1 as u32;
                let norm = NormLaunch::new(inverse.dense_array(1), base, gamma.array(), gamma.geometry(), gamma.source);
                PrologueArgs::RmsNorm(norm)
            }
        }
    }
}

/// What is done with the words of x that were loaded, before they are cast; chosen when the kernel is generated.
// Launches make `PrologueArgs`, and code that is generated the expanded type.
#[allow(dead_code)]
#[derive(CubeType, CubeLaunch)]
pub(crate) enum Prologue<N: Size> {
    Nothing,
    /// SwiGLU of x and this, which lies as x does.
    SwiGlu(Array<Vector<u32, N>>),
    RmsNorm(Norm<N>),
}

/// What RMSNorm reads beside x.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Norm<N: Size> {
    /// `1 / √(mean x² + ε)` of each row.
    inverse: Array<Vector<f32, Const<1>>>,
    /// Where that of the first row is.
    inverse_base: u32,
    gamma: Array<Vector<u32, N>>,
    gamma_geometry: Geometry,
    #[cube(comptime)]
    gamma_source: Source,
}

/// Sectors of x below each other, as [`load_sector`] has left them one after another in words from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Loaded {
    pub(crate) first: u32,
    pub(crate) rows: u32,
    pub(crate) source: Source,
    pub(crate) isa: Isa,
}

#[cube]
impl<N: Size> Prologue<N> {
    /// What [`apply`](Self::apply) needs of `rows` rows from `row` on, the same for all their columns.
    pub(crate) fn of_rows(
        &self,
        geometry: &Geometry,
        row: u32,
        #[comptime] rows: u32,
        #[comptime] isa: Isa,
    ) -> Array<f32> {
        let mut inverse = Array::<f32>::new(comptime!(rows as usize));
        match self {
            Prologue::Nothing => {}
            Prologue::SwiGlu(_) => {}
            Prologue::RmsNorm(norm) =>
            {
                #[unroll]
                for i in 0..rows {
                    let index = norm.inverse_base + min(row + i, geometry.rows - 1);
                    load_pinned(&norm.inverse, index, &mut inverse, i, isa);
                }
            }
        }
        inverse
    }

    /// Puts what is cast in the place of the sectors of x from column `col` on in rows from `row` on, of which there is
    /// [`of_rows`](Self::of_rows). Past the last row and column too it repeats the last.
    pub(crate) fn apply(
        &self,
        geometry: &Geometry,
        row: u32,
        of_rows: &Array<f32>,
        col: u32,
        raw: &mut Array<u32>,
        #[comptime] loaded: Loaded,
    ) {
        let Loaded { first, rows, source, isa } = comptime!(loaded);
        match self {
            Prologue::Nothing => {}
            Prologue::SwiGlu(up) => {
                let words = comptime!(rows * SECTOR_WORDS);
                let mut ups = Array::<u32>::new(comptime!(words as usize));
                #[unroll]
                for i in 0..rows {
                    load_sector(up, geometry, row + i, col, &mut ups, comptime!(i * SECTOR_WORDS), source, isa);
                }
                all_loaded(isa);
                swiglu_words(raw, first, &ups, words, source, isa);
            }
            Prologue::RmsNorm(norm) => {
                let gamma = norm.load_gamma(geometry, col, source, isa);
                all_loaded(isa);
                #[unroll]
                for i in 0..rows {
                    let to = comptime!(first + i * SECTOR_WORDS);
                    normed_words(raw, to, of_rows[i as usize], &gamma, source, norm.gamma_source, isa);
                }
            }
        }
    }
}

#[cube]
impl<N: Size> Norm<N> {
    /// γ of the columns of a sector of x, as words of [`load_vector`].
    fn load_gamma(
        &self,
        geometry: &Geometry,
        col: u32,
        #[comptime] source: Source,
        #[comptime] isa: Isa,
    ) -> Array<u32> {
        let gamma_source = comptime!(self.gamma_source);
        let (len, gamma_len) = comptime!((source.vector_len(), gamma_source.vector_len()));
        // No more than there are in a vector of x: γ has x's dtype or a wider one.
        let each = comptime!(len / gamma_len);
        let mut gamma = Array::<u32>::new(comptime!((2 * each * 4) as usize));
        let width = N::value();
        #[unroll]
        for v in 0..2u32 {
            let at = col + comptime!(v * len);
            // Past the last column the elements that x repeats there.
            let at = if comptime!(width > 1) { min(at, geometry.cols - len) } else { at };
            #[unroll]
            for i in 0..each {
                let to = comptime!((v * each + i) * 4);
                load_vector(
                    &self.gamma,
                    &self.gamma_geometry,
                    0u32.runtime(),
                    at + comptime!(i * gamma_len),
                    &mut gamma,
                    to,
                    gamma_source,
                    isa,
                );
            }
        }
        gamma
    }
}

/// `x inverse γ` in the place of a sector of x in `raw[first..]`: in this order, as [`rms_norm`](super::rms_norm()).
#[cube]
fn normed_words(
    raw: &mut Array<u32>,
    #[comptime] first: u32,
    inverse: f32,
    gamma: &Array<u32>,
    #[comptime] source: Source,
    #[comptime] gamma_source: Source,
    #[comptime] isa: Isa,
) {
    let inverse = Vector::<f32, Const<2>>::new(inverse);
    #[unroll]
    for w in 0..SECTOR_WORDS {
        let values = unpacked(raw, first, w, source, source, isa);
        let weights = unpacked(gamma, 0u32, w, source, gamma_source, isa);
        raw[comptime!((first + w) as usize)] = packed(values * inverse * weights, source);
    }
}
