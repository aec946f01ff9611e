//! Scaled dot-product attention, forward and backward, in memory linear in the number of positions.
//!
//! ```text
//! S = softcap(scale · q kᵀ) + bias, hidden where masked      P = softmax(S)      y = P v
//! lse = ln Σ exp S        δ = Σ y ∘ dy        dS = P ∘ (dy vᵀ - δ) · softcap'
//! dq = scale · dS k       dk = scale · dSᵀ q       dv = Pᵀ dy
//! ```
//! q is `[B, H, T, d]`, k `[B, KV, S, d]`, v `[B, KV, S, e]`. Each of the KV heads serves `H / KV`
//! consecutive query heads. Scores and sums are f32. Every sum has a fixed order, so results have
//! the same bits in each run. Backward makes S twice, for dq and for dk with dv: no atomics and no
//! workspace. Source: Dao, *FlashAttention-2* (2023), sections 3.1 and 3.2.
//!
//! Rows stay in a cube (queries, or keys for dk and dv), while columns of the other side pass by.
//! Columns that a mask hides for all these rows are skipped.

mod decode;
mod hopper;
mod launch;
mod mma;
mod prepare;
mod problem;
mod tile;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use self::decode::{Parted, combine, parted};
pub use self::hopper::{AttentionSchedule, fix_attention_schedule};
use self::launch::{Backward, Launch, Role};
use self::prepare::{row_stats, tile_classes};
pub(crate) use self::problem::Kind;
use self::problem::{Classes, Heads, HeadsConfig, Spread};
use crate::KernelError;
use crate::arch::{CudaArch, cuda_arch};
use crate::denylist::{disable, is_disabled};
use crate::grid::is_cpu;
use crate::view::{MAX_INDEX, check_bytes, supports};

/// Rows and columns of a tile of scores.
const TILE: u32 = 64;

/// Largest head size that the kernels take.
pub const MAX_WIDTH: usize = 256;

/// Score of a hidden key. WGSL need not represent infinities.
const HIDDEN: f32 = -1e30;

/// Least maximum of a row's scores. Hidden scores are far below it, so their weights are 0. A row
/// whose lse does not exceed it sees no key.
const NOTHING: f32 = HIDDEN / 10.0;

/// Strided `[B, heads, positions, width]` in device memory.
#[derive(Clone, Debug)]
pub struct HeadsView {
    /// Memory. Its offset is the first element.
    pub handle: Handle,
    /// B, heads, positions and width.
    pub shape: [usize; 4],
    /// Elements between neighbours on each axis. Zero repeats.
    pub strides: [usize; 4],
    /// f32, f16 or bf16; u8 or u32 for a mask.
    pub dtype: StorageType,
}

/// Inputs of attention on the device.
#[derive(Clone, Debug)]
pub struct AttentionInputs {
    /// `[B, H, T, d]`.
    pub query: HeadsView,
    /// `[B, KV, S, d]`.
    pub key: HeadsView,
    /// `[B, KV, S, e]`.
    pub value: HeadsView,
    /// `[B, H, T, S]`, each axis 1 to broadcast. Nonzero hides a key.
    pub mask: Option<HeadsView>,
    /// `[B, H, T, S]`, each axis 1 to broadcast. Added to scores.
    pub bias: Option<HeadsView>,
    /// Contiguous i32 `[B, S]`, where T = S. A position sees only positions with the same id.
    pub documents: Option<Handle>,
    /// Factor of q · k.
    pub scale: f32,
    /// `softcap · tanh(score / softcap)` replaces a score. Positive.
    pub softcap: Option<f32>,
    /// Whether query `t` sees only keys up to `t + S - T`.
    pub causal: bool,
    /// Fastest kernel that may run. The next ones take what it does not.
    pub kernel: AttentionKernel,
}

/// A kernel of attention, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttentionKernel {
    /// Warpgroups and TMA of Hopper, as [`Mma`](Self::Mma), for more than 64 queries without a bias.
    Wgmma,
    /// Tensor cores of CUDA devices, for f16 and bf16 in rows of whole 16 bytes. P and dS are
    /// rounded to the dtype.
    Mma,
    /// f32 tiles on any device.
    Tiles,
}

impl AttentionKernel {
    /// All kernels, the fastest first.
    pub const ALL: [Self; 3] = [Self::Wgmma, Self::Mma, Self::Tiles];

    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Wgmma => "wgmma",
            Self::Mma => "mma",
            Self::Tiles => "tiles",
        }
    }

    /// Whether the device has its instructions.
    pub fn runs_on<R: Runtime>(self, client: &ComputeClient<R>) -> bool {
        match self {
            Self::Wgmma => cuda_arch(client) == Some(CudaArch::Sm90),
            Self::Mma => cuda_arch(client).is_some(),
            Self::Tiles => true,
        }
    }
}

/// Compile-time parameters of the attention kernels for some inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionVariant {
    /// Kernel.
    pub kernel: AttentionKernel,
    pub(crate) config: HeadsConfig,
    /// Whether forward takes the keys in parts.
    pub(crate) parted: bool,
    /// Whether the gradients run too.
    pub(crate) backward: bool,
}

/// Disables a kernel of attention on this device. The next one takes its place. Without one,
/// attention returns [`KernelError::Disabled`].
pub fn disable_attention<R: Runtime>(client: &ComputeClient<R>, kernel: AttentionKernel) {
    disable(client, kernel);
}

/// First kernel from `fastest` on that takes a problem, has these roles and is not disabled.
fn select<R: Runtime>(
    client: &ComputeClient<R>,
    fastest: AttentionKernel,
    config: HeadsConfig,
    roles: &[Role],
) -> Option<AttentionKernel> {
    let takes = |kernel: AttentionKernel| match kernel {
        AttentionKernel::Wgmma => hopper::takes(client, config, roles),
        AttentionKernel::Mma => mma::takes(config),
        AttentionKernel::Tiles => true,
    };
    let mut kernels = AttentionKernel::ALL.into_iter().skip_while(|kernel| *kernel != fastest);
    kernels.find(|kernel| kernel.runs_on(client) && takes(*kernel) && !is_disabled(client, *kernel))
}

/// Whether the device has the shared memory and the bindings that the kernels need.
pub fn has_attention<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let hardware = &client.properties().hardware;
    hardware.max_shared_memory_size >= tile::SHARED_BYTES && hardware.max_bindings >= MAX_BINDINGS
}

/// Whether the kernels are expected to be the faster way. Not on a CPU behind a graphics driver,
/// where a barrier costs dozens of operations.
pub fn prefers_attention<R: Runtime>(client: &ComputeClient<R>) -> bool {
    !is_cpu(client)
}

/// Buffers of the kernel with the most: q, k, v, dy, stats, dk, dv, mask, bias, documents, classes,
/// and CubeCL's own.
const MAX_BINDINGS: u32 = 12;

/// Result of [`attention_forward`].
#[derive(Clone, Debug)]
pub struct AttentionOutput {
    /// `[B, T, H, e]`, contiguous, in q's dtype. 0 for a query that sees no key.
    pub y: Handle,
    /// Logarithm of the sum of exponentials of each query's scores, f32 `[B, H, T]`. At most -1e29
    /// for a query that sees no key.
    pub lse: Handle,
}

/// Forward.
///
/// # Errors
/// [`KernelError::EmptyMatrix`], [`ShapeMismatch`](KernelError::ShapeMismatch),
/// [`UnsupportedDtype`](KernelError::UnsupportedDtype), [`OutOfBounds`](KernelError::OutOfBounds),
/// [`Misaligned`](KernelError::Misaligned), [`TooLarge`](KernelError::TooLarge),
/// [`Disabled`](KernelError::Disabled).
pub fn attention_forward<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &AttentionInputs,
) -> Result<AttentionOutput, KernelError> {
    let problem = CheckedHeads::forward(client, inputs)?;
    let classes = tile_classes(client, &problem);
    let role = if problem.parts.is_some() { Role::Part } else { Role::Forward };
    let [y, _, lse] = run(client, &problem, role, None, classes.as_ref());
    let output = AttentionOutput { y: y.expect("forward's"), lse: lse.expect("forward's") };
    let element_type = problem.config.element_type;
    Ok(match problem.parts {
        Some(parts) => combine(client, inputs, element_type, parts, &output),
        None => output,
    })
}

/// Gradients of q, k and v, contiguous in their shapes and dtype, from the gradient dy of y, shaped
/// `[B, H, T, e]`, and the results of forward; `y` is a view of the same shape.
///
/// # Errors
/// As [`attention_forward`].
pub fn attention_backward<R: Runtime>(
    client: &ComputeClient<R>,
    inputs: &AttentionInputs,
    y: &HeadsView,
    lse: &Handle,
    dy: &HeadsView,
) -> Result<[Handle; 3], KernelError> {
    let problem = CheckedHeads::new(client, inputs, Some(dy))?;
    let [batch, heads, queries, _] = problem.query.shape();
    let (y, dy) = (problem.output(client, y)?, problem.output(client, dy)?);
    check_bytes(lse, 4 * (batch * heads * queries) as u64, || "logarithms of sums".into())?;
    let classes = tile_classes(client, &problem);
    let stats = row_stats(client, &y, &dy, lse);
    let backward = Some(Backward { dy: &dy, stats: &stats });
    let mut gradients = [const { None }; 3];
    for role in problem.backward_roles() {
        let [dv, slopes, _] = run(client, &problem, *role, backward, classes.as_ref());
        let at = usize::from(*role != Role::Queries);
        gradients[at] = gradients[at].take().or(slopes);
        gradients[2] = gradients[2].take().or(dv);
    }
    Ok(gradients.map(|gradient| gradient.expect("each role's")))
}

/// Runs a role. Returns y or dv, dq or dk, and lse, if the role has them.
fn run<R: Runtime>(
    client: &ComputeClient<R>,
    problem: &CheckedHeads,
    role: Role,
    backward: Option<Backward<'_>>,
    classes: Option<&Classes>,
) -> [Option<Handle>; 3] {
    let launch = Launch::new(client, problem, role, backward, classes);
    match problem.kernel {
        AttentionKernel::Wgmma => hopper::launch(client, &launch),
        AttentionKernel::Mma => mma::launch(client, &launch),
        AttentionKernel::Tiles => tile::launch(client, &launch),
    }
    launch.results
}

impl AttentionVariant {
    /// Variant that these inputs run, or with `dy`, the gradient of y, their backward.
    ///
    /// # Errors
    /// As [`attention_forward`].
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        inputs: &AttentionInputs,
        dy: Option<&HeadsView>,
    ) -> Result<Self, KernelError> {
        let forward = || CheckedHeads::forward(client, inputs);
        let checked = dy.map_or_else(forward, |dy| CheckedHeads::new(client, inputs, Some(dy)))?;
        let CheckedHeads { kernel, config, parts, .. } = checked;
        Ok(Self { kernel, config, parted: parts.is_some(), backward: dy.is_some() })
    }
}

/// Roles of backward where a launch makes dk and dv.
const TOGETHER: [Role; 2] = [Role::Queries, Role::Keys { dk: true, dv: true }];

/// Checked inputs.
struct CheckedHeads {
    kernel: AttentionKernel,
    query: Heads,
    key: Heads,
    value: Heads,
    mask: Option<Spread>,
    bias: Option<Spread>,
    documents: Option<Handle>,
    scale: f32,
    softcap: f32,
    config: HeadsConfig,
    /// Number of parts of the keys, if forward takes parts.
    parts: Option<usize>,
}

impl CheckedHeads {
    /// Inputs of forward.
    fn forward<R: Runtime>(client: &ComputeClient<R>, inputs: &AttentionInputs) -> Result<Self, KernelError> {
        match parted(client, inputs) {
            Some(Parted { inputs, parts }) => Ok(Self { parts: Some(parts), ..Self::new(client, &inputs, None)? }),
            None => Self::new(client, inputs, None),
        }
    }

    fn new<R: Runtime>(
        client: &ComputeClient<R>,
        inputs: &AttentionInputs,
        dy: Option<&HeadsView>,
    ) -> Result<Self, KernelError> {
        let AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, .. } = inputs;
        let ([batch, heads, queries, dim], [_, kv_heads, keys, width]) = (query.shape, value.shape);
        let rows = |view: &HeadsView| [view.shape[..3].iter().product(), view.shape[3]];
        for (view, shape) in [(key, [batch, kv_heads, keys, dim]), (value, [batch, kv_heads, keys, width])] {
            if view.shape != shape || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
                return Err(KernelError::ShapeMismatch { x: rows(query), operand: rows(view) });
            }
            if view.dtype != query.dtype {
                return Err(KernelError::UnsupportedDtype { dtype: view.dtype });
            }
        }
        if !supports(client, query.dtype) || !has_attention(client) {
            return Err(KernelError::UnsupportedDtype { dtype: query.dtype });
        }
        if dim.max(width) > MAX_WIDTH {
            let [rows, cols] = [heads * queries, dim.max(width)];
            return Err(KernelError::TooLarge { rows, cols, strides: [cols, 1], limit: MAX_WIDTH as u64 });
        }
        let scores = [batch, heads, queries, keys];
        let spread = |view: &HeadsView| {
            if view.shape.iter().zip(scores).any(|(&own, all)| own != 1 && own != all) {
                return Err(KernelError::ShapeMismatch { x: [heads * queries, keys], operand: rows(view) });
            }
            Spread::new(client, view)
        };
        let (mask, bias) = (mask.as_ref().map(spread).transpose()?, bias.as_ref().map(spread).transpose()?);
        if let Some(documents) = documents {
            if queries != keys {
                return Err(KernelError::ShapeMismatch { x: [batch, queries], operand: [batch, keys] });
            }
            check_bytes(documents, 4 * (batch * keys) as u64, || format!("documents [{batch}, {keys}]"))?;
        }
        let [query, key, value] = [query, key, value].map(|view| Heads::new(client, view));
        let (query, key, value) = (query?, key?, value?);
        let dy = dy.map(|view| Heads::new(client, view)).transpose()?;
        let outputs = [batch * heads * queries * width.max(dim), batch * kv_heads * keys * width.max(dim)];
        if outputs.iter().any(|&elements| elements as u64 > MAX_INDEX) {
            let limit = MAX_INDEX;
            return Err(KernelError::TooLarge { rows: outputs[0], cols: width, strides: [width, 1], limit });
        }
        let words = [&query, &key, &value].into_iter().chain(&dy).map(Heads::vector_words).min();
        let config = HeadsConfig {
            element_type: query.element_type,
            words: words.expect("three"),
            slices: [dim, width].map(|width| width.div_ceil(TILE as usize) as u32),
            causal: *causal,
            softcap: softcap.is_some(),
            mask: mask.as_ref().map(|mask| mask.kind),
            bias: bias.as_ref().map(|bias| bias.kind),
            documents: documents.is_some(),
        };
        let roles: &[Role] = if dy.is_some() { &TOGETHER } else { &[Role::Forward] };
        let has_maps = queries > TILE as usize && [&query, &key, &value].into_iter().chain(&dy).all(Heads::has_map);
        let fastest = if has_maps { inputs.kernel } else { inputs.kernel.max(AttentionKernel::Mma) };
        let kernel = select(client, fastest, config, roles).ok_or(KernelError::Disabled)?;
        let (documents, softcap) = (documents.clone(), softcap.unwrap_or(1.0));
        Ok(Self { kernel, query, key, value, mask, bias, documents, scale: *scale, softcap, config, parts: None })
    }

    /// Roles of backward.
    fn backward_roles(&self) -> &'static [Role] {
        const APART: [Role; 3] =
            [Role::Queries, Role::Keys { dk: true, dv: false }, Role::Keys { dk: false, dv: true }];
        match self.kernel {
            AttentionKernel::Mma if !mma::fits_both(self.config) => &APART,
            _ => &TOGETHER,
        }
    }

    /// A tensor of y's shape.
    fn output<R: Runtime>(&self, client: &ComputeClient<R>, view: &HeadsView) -> Result<Heads, KernelError> {
        let ([batch, heads, queries, _], [.., width]) = (self.query.shape(), self.value.shape());
        if view.shape != [batch, heads, queries, width] {
            let rows = batch * heads * queries;
            let operand = [view.shape[..3].iter().product(), view.shape[3]];
            return Err(KernelError::ShapeMismatch { x: [rows, width], operand });
        }
        let heads = Heads::new(client, view)?;
        if heads.element_type != self.query.element_type {
            return Err(KernelError::UnsupportedDtype { dtype: view.dtype });
        }
        Ok(heads)
    }
}
