//! [`adamw`]: AdamW in one pass over a parameter and its moments, in place.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::amax::Maxima;
use crate::denylist::{disable, is_disabled};
use crate::element_type::ElementType;
use crate::format::F32_INF;
use crate::grid::{UNITS, cube_max, elementwise_cubes};
use crate::ptx::cvt::Isa;
use crate::version::Version;
use crate::view::Checked;
use crate::words::words;
use crate::{KernelError, MatrixView, supports};

/// AdamW step in f32. Each operation is rounded to f32:
///
/// ```text
/// m = m β₁ + g (1 - β₁)        v = v β₂ + g g (1 - β₂)         first step: g (1 - β₁), g g (1 - β₂)
/// w = w decay - (m / c₁) / (√(v / c₂) + ε) · lr                c = 1 - β^t
/// ```
/// [Loshchilov and Hutter, 2019](https://arxiv.org/abs/1711.05101), in the order of Burn's
/// operations.
#[derive(Clone, Debug)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f32,
    /// β₁ and β₂.
    pub betas: [f32; 2],
    /// ε.
    pub epsilon: f32,
    /// Factor applied to the parameter first, if it decays.
    pub decay: Option<f32>,
    /// t: number of steps including this one, from 1.
    pub time: usize,
    /// Stochastic rounding of the parameter, m and v to bf16. Without keys, each is rounded to
    /// nearest in its storage dtype.
    pub rounding: [Option<RoundingKeys>; 3],
}

impl AdamWStep {
    /// c₁ and c₂.
    #[must_use]
    pub fn corrections(&self) -> [f32; 2] {
        self.betas.map(|beta| 1.0 - beta.powi(self.time as i32))
    }
}

/// 16 random bits for each index of each axis of a tensor. The bits of an element are the XOR of
/// the bits of its indices.
///
/// x becomes the upper 16 bits of `bits(x) + r` if the nearest bf16 is a normal number and |x| is
/// at most the largest bf16. Other values are rounded to nearest.
#[derive(Clone, Debug)]
pub struct RoundingKeys(pub Vec<Vec<u16>>);

impl RoundingKeys {
    /// Bits of each row, in row order, and of the indices of the last axis.
    ///
    /// # Panics
    /// If the keys are not of a tensor with these dimensions.
    #[must_use]
    pub fn by_row(&self, dims: &[usize]) -> (Vec<u16>, &[u16]) {
        assert!(self.0.iter().map(Vec::len).eq(dims.iter().copied()), "a key for each index of {dims:?}");
        let (last, leading) = self.0.split_last().expect("a parameter has an axis");
        let rows = leading.iter().fold(vec![0], |rows, axis| {
            rows.iter().flat_map(|row| axis.iter().map(move |key| row ^ key)).collect::<Vec<u16>>()
        });
        (rows, last)
    }
}

/// A parameter, its moments and its gradient: contiguous matrices of one shape.
#[derive(Clone, Debug)]
pub struct AdamWArgs {
    /// The parameter, f32, f16 or bf16.
    pub param: MatrixView,
    /// m and v, of one dtype.
    pub moments: [MatrixView; 2],
    /// The gradient.
    pub grad: MatrixView,
}

/// Kernel of a step: its compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AdamWVariant {
    /// dtype of the parameter.
    pub param: StorageType,
    /// dtype of both moments.
    pub moments: StorageType,
    /// dtype of the gradient.
    pub grad: StorageType,
    /// Whether the parameter and both moments are rounded stochastically.
    pub rounded: [bool; 2],
}

impl AdamWVariant {
    /// Whether the kernel runs on this device.
    pub fn is_supported<R: Runtime>(&self, client: &ComputeClient<R>) -> bool {
        let dtypes = [self.param, self.moments, self.grad];
        dtypes.into_iter().all(|dtype| supports(client, dtype)) && !is_disabled(client, Kernel)
    }
}

/// Key of the kernel in the denylist.
#[derive(Hash)]
struct Kernel;

/// Disables the kernel on this device. It then returns [`KernelError::Disabled`].
pub fn disable_adamw<R: Runtime>(client: &ComputeClient<R>) {
    disable(client, Kernel);
}

/// Changes the parameter and its moments in their memory. `dims` is the shape that the rounding
/// keys have, with the columns of the matrices last. At the first step the moments are not read.
///
/// With `observe` returns max |w| of the new parameter, f32 `[1]`.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ShapeMismatch`](KernelError::ShapeMismatch),
/// [`NotContiguous`](KernelError::NotContiguous),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds),
/// [`Misaligned`](KernelError::Misaligned), [`TooLarge`](KernelError::TooLarge),
/// [`Disabled`](KernelError::Disabled).
///
/// # Panics
/// If rounding keys are not of `dims`.
pub fn adamw<R: Runtime>(
    client: &ComputeClient<R>,
    step: &AdamWStep,
    args: &AdamWArgs,
    dims: &[usize],
    observe: bool,
) -> Result<Option<Handle>, KernelError> {
    if is_disabled(client, Kernel) {
        return Err(KernelError::Disabled);
    }
    let AdamWArgs { param, moments: [first, second], grad } = args;
    if first.dtype != second.dtype {
        return Err(KernelError::UnsupportedDtype { dtype: second.dtype });
    }
    let tensors = Checked::dense(client, [param, first, second, grad], |_| true)?.map(Checked::flatten);
    let width = tensors.iter().map(Checked::dense_width).min().expect("four tensors");
    let [rows, cols] = param.shape;
    let keys = Keys::new(client, step, dims, rows + cols);
    let vectors = rows * cols / width;
    let cubes = elementwise_cubes(rows * cols);
    let maxima = words(client, cubes);
    let [param_base, first_base, second_base, grad_base] =
        tensors.each_ref().map(|tensor| (tensor.memory().1 / width) as u32);
    let [param_arg, first_arg, second_arg, grad_arg] = tensors.each_ref().map(|tensor| tensor.dense_array(width));
    let [beta_1, beta_2] = step.betas;
    let [correction_1, correction_2] = step.corrections();
    let scalars = StepLaunch::new(
        step.lr,
        beta_1,
        beta_2,
        1.0 - beta_1,
        1.0 - beta_2,
        correction_1,
        correction_2,
        step.epsilon,
        step.decay.unwrap_or(1.0),
        u32::from(step.time == 1),
        param_base,
        first_base,
        second_base,
        grad_base,
        vectors as u32,
        rows as u32,
        cols as u32,
    );
    // SAFETY: the tensors are checked, indices stay below `vectors`, keys have a word for each row
    // and column, and each cube writes one maximum.
    unsafe {
        step_elements::launch_unchecked::<R>(
            client,
            CubeCount::new_1d(cubes as u32),
            CubeDim::new_1d(UNITS),
            width,
            param_arg,
            first_arg,
            second_arg,
            grad_arg,
            ArrayArg::from_raw_parts(keys.handle.clone(), keys.len),
            ArrayArg::from_raw_parts(maxima.clone(), cubes),
            scalars,
            keys.first,
            Isa::of(client),
            param.dtype,
            first.dtype,
            grad.dtype,
            Version::of(client),
        );
    }
    Ok(observe.then(|| Maxima::partial(maxima, cubes, ElementType::F32).fold(client)))
}

/// Keys of the rounded tensors in device memory: a word for each row and for each column.
struct Keys {
    handle: Handle,
    len: usize,
    /// First word of each tensor, if it is rounded stochastically.
    first: [Option<u32>; 3],
}

impl Keys {
    fn new<R: Runtime>(client: &ComputeClient<R>, step: &AdamWStep, dims: &[usize], each: usize) -> Self {
        let (mut all, mut first) = (vec![], [None; 3]);
        for (keys, first) in step.rounding.iter().zip(&mut first) {
            let Some(keys) = keys else { continue };
            let (rows, last) = keys.by_row(dims);
            *first = Some((all.len() / each) as u32);
            all.extend(rows.iter().chain(last).map(|key| u32::from(*key)));
        }
        let handle = match all.is_empty() {
            true => words(client, 1),
            false => client.create_from_slice(u32::as_bytes(&all)),
        };
        Self { handle, len: all.len().max(1), first }
    }
}

/// Scalars of a step.
#[derive(CubeType, CubeLaunch)]
struct Step {
    lr: f32,
    beta_1: f32,
    beta_2: f32,
    factor_1: f32,
    factor_2: f32,
    correction_1: f32,
    correction_2: f32,
    epsilon: f32,
    decay: f32,
    /// Whether the moments do not exist yet.
    is_first: u32,
    param_base: u32,
    first_base: u32,
    second_base: u32,
    grad_base: u32,
    vectors: u32,
    rows: u32,
    cols: u32,
}

/// Cubes stride through the vectors.
#[cube(launch_unchecked)]
fn step_elements<P: Float, M: Float, G: Float, N: Size>(
    param: &mut Array<Vector<P, N>>,
    first: &mut Array<Vector<M, N>>,
    second: &mut Array<Vector<M, N>>,
    grad: &Array<Vector<G, N>>,
    keys: &Array<u32>,
    maxima: &mut Array<u32>,
    step: &Step,
    #[comptime] keys_of: [Option<u32>; 3],
    #[comptime] isa: Isa,
    #[define(P)] _param_dtype: StorageType,
    #[define(M)] _moment_dtype: StorageType,
    #[define(G)] _grad_dtype: StorageType,
    #[comptime] _version: Version,
) {
    let mut largest = 0u32.runtime();
    let mut at = ABSOLUTE_POS as u32;
    while at < step.vectors {
        let (w_at, m_at) = ((step.param_base + at) as usize, (step.first_base + at) as usize);
        let v_at = (step.second_base + at) as usize;
        let g = Vector::<f32, N>::cast_from(grad[(step.grad_base + at) as usize]);
        let mut m = g * scalar::<N>(step.factor_1);
        let mut v = g * g * scalar::<N>(step.factor_2);
        if step.is_first == 0u32 {
            m = Vector::<f32, N>::cast_from(first[m_at]) * scalar::<N>(step.beta_1) + m;
            v = Vector::<f32, N>::cast_from(second[v_at]) * scalar::<N>(step.beta_2) + v;
        }
        let root = (v / scalar::<N>(step.correction_2)).sqrt() + scalar::<N>(step.epsilon);
        let change = m / scalar::<N>(step.correction_1) / root * scalar::<N>(step.lr);
        let w = Vector::<f32, N>::cast_from(param[w_at]) * scalar::<N>(step.decay) - change;
        let w = rounded::<N>(w, keys, at, step, comptime!(keys_of[0]));
        let stored = Vector::<P, N>::cast_from(w);
        param[w_at] = stored;
        first[m_at] = Vector::<M, N>::cast_from(rounded::<N>(m, keys, at, step, comptime!(keys_of[1])));
        second[v_at] = Vector::<M, N>::cast_from(rounded::<N>(v, keys, at, step, comptime!(keys_of[2])));
        let stored = Vector::<f32, N>::cast_from(stored);
        #[unroll]
        for lane in 0..N::value() {
            largest = max(largest, u32::reinterpret(stored[lane]) & 0x7fff_ffffu32);
        }
        at += CUBE_COUNT as u32 * UNITS;
    }
    let largest = cube_max(largest, isa);
    if UNIT_POS == 0 {
        maxima[CUBE_POS] = largest;
    }
}

#[cube]
fn scalar<N: Size>(value: f32) -> Vector<f32, N> {
    Vector::<f32, N>::new(value)
}

/// Values rounded to bf16 with the keys of a tensor. Without keys, returns the values.
#[cube]
fn rounded<N: Size>(
    values: Vector<f32, N>,
    keys: &Array<u32>,
    at: u32,
    step: &Step,
    #[comptime] keys_of: Option<u32>,
) -> Vector<f32, N> {
    if comptime!(keys_of.is_none()) {
        values
    } else {
        let mut result = values;
        let width = N::value();
        let begin = comptime!(keys_of.unwrap_or(0)) * (step.rows + step.cols);
        #[unroll]
        for lane in 0..width {
            let element = at * comptime!(width as u32) + comptime!(lane as u32);
            let row = keys[(begin + element / step.cols) as usize];
            let col = keys[(begin + step.rows + element % step.cols) as usize];
            result[lane] = round_stochastic(values[lane], row ^ col);
        }
        result
    }
}

/// x rounded to bf16 with random bits `r`, as [`RoundingKeys`] defines.
#[cube]
fn round_stochastic(x: f32, r: u32) -> f32 {
    let bits = u32::reinterpret(x);
    let magnitude = bits & 0x7fff_ffffu32;
    let up = 0x7fffu32 + ((bits >> 16u32) & 1u32);
    // The smallest normal and the largest finite bf16.
    let nearest = (magnitude + up) >> 16u32;
    // Subnormal values wrap around to large ones.
    let is_between = nearest - 0x0080u32 <= 0x7effu32 && magnitude <= 0x7f7f_0000u32;
    let sum = bits + select(is_between, r, up);
    let result = f32::reinterpret(sum & 0xffff_0000u32);
    select(magnitude > F32_INF, x, result)
}
