//! Kernel arguments of attention: strided heads, broadcast masks, and the [`Scores`] of a tile.

use cubecl::ir::{ElemType, StorageType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{CheckedHeads, HeadsView, TILE};
use crate::KernelError;
use crate::element_type::ElementType;
use crate::gemm::tma::maps::{ROW_BYTES, without_shape};
use crate::load::{Geometry, GeometryLaunch, widen};
use crate::view::Bound;

/// Compile-time parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HeadsConfig {
    pub(crate) element_type: ElementType,
    /// Words of a load of q, k and v: 4 if all their rows are vectors, else 1.
    pub(crate) words: usize,
    /// Slices of [`TILE`] of d and e.
    pub(crate) slices: [u32; 2],
    pub(crate) causal: bool,
    pub(crate) softcap: bool,
    pub(crate) mask: Option<Kind>,
    pub(crate) bias: Option<Kind>,
    pub(crate) documents: bool,
}

impl HeadsConfig {
    /// Whether tiles have a class.
    pub(super) const fn has_classes(self) -> bool {
        self.mask.is_some() || self.documents
    }
}

/// Element of a mask or bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A bool in a byte.
    Byte,
    /// A bool in a word.
    Word,
    Float(ElementType),
}

impl Kind {
    fn of(dtype: StorageType) -> Result<Self, KernelError> {
        match dtype {
            StorageType::Scalar(ElemType::UInt(UIntKind::U8)) => Ok(Self::Byte),
            StorageType::Scalar(ElemType::UInt(UIntKind::U32)) => Ok(Self::Word),
            _ => ElementType::of(dtype).map(Self::Float),
        }
    }

    const fn per_word(self) -> u32 {
        match self {
            Self::Byte => 4,
            Self::Word => 1,
            Self::Float(element_type) => element_type.per_word(),
        }
    }
}

/// Checked tensor of four axes.
#[derive(Clone, Debug)]
pub(super) struct Strided {
    bound: Bound,
    pub(super) shape: [usize; 4],
    strides: [usize; 4],
    /// Words from the start of the binding to the end of the last element.
    words: usize,
}

impl Strided {
    fn new<R: Runtime>(client: &ComputeClient<R>, view: &HeadsView, per_word: u32) -> Result<Self, KernelError> {
        let &HeadsView { shape, strides, .. } = view;
        let [rows, cols] = [shape[..3].iter().product(), shape[3]];
        if rows * cols == 0 {
            return Err(KernelError::EmptyMatrix { rows, cols });
        }
        let last = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>();
        let size = 4 / per_word as usize;
        let bound = Bound::new(client, &view.handle, size, last as u64, [rows, cols], [strides[2], strides[3]])?;
        let words = (bound.base + last + 1).div_ceil(per_word as usize);
        Ok(Self { bound, shape, strides, words })
    }

    /// Kernel argument. The last word may contain elements past the end, inside the allocation.
    fn array<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `new` has checked that all elements are inside the handle.
        unsafe { ArrayArg::from_raw_parts(self.bound.handle.clone(), self.words) }
    }
}

/// Checked q, k, v, y or dy.
#[derive(Clone, Debug)]
pub(super) struct Heads {
    strided: Strided,
    pub(super) element_type: ElementType,
}

impl Heads {
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, view: &HeadsView) -> Result<Self, KernelError> {
        let element_type = ElementType::of(view.dtype)?;
        Ok(Self { strided: Strided::new(client, view, element_type.per_word())?, element_type })
    }

    pub(super) fn shape(&self) -> [usize; 4] {
        self.strided.shape
    }

    /// Words of a load: 4 if every 16 bytes of a row are one aligned load, else 1.
    pub(super) fn vector_words(&self) -> usize {
        let Strided { bound, shape, strides: [batch, head, row, col], .. } = &self.strided;
        let all = [bound.base, shape[3], *batch, *head, *row];
        let len = self.element_type.vector_len() as usize;
        if *col == 1 && all.iter().all(|elements| elements.is_multiple_of(len)) { 4 } else { 1 }
    }

    pub(super) fn array<R: Runtime>(&self) -> ArrayArg<R> {
        self.strided.array()
    }

    /// Whether TMA can load it: rows of whole 16 bytes, and no axis that repeats.
    pub(super) fn has_map(&self) -> bool {
        let Strided { shape, strides, .. } = &self.strided;
        let repeats = shape.iter().zip(strides).any(|(size, stride)| *size > 1 && *stride == 0);
        self.vector_words() > 1 && !repeats
    }

    /// Boxes of `rows` positions of a head, 128 bytes each.
    pub(super) fn map<R: Runtime>(&self, rows: u32) -> TensorMapArg<R, Tiled> {
        let Strided { bound, shape, strides, .. } = &self.strided;
        let size = self.element_type.size();
        let handle = bound.handle.clone().offset_start((bound.base * size) as u64);
        let [batch, heads, positions, width] = *shape;
        let mut axes = shape.iter().zip(strides);
        // The distance of a single position, head or batch is never used.
        let strides = [(); 3].map(|()| match axes.next() {
            Some((&count, stride)) if count > 1 => stride * size,
            _ => width * size,
        });
        let (strides, shape) = ([strides[0], strides[1], strides[2], 1], [batch, heads, positions, width * size]);
        let dtype = StorageType::Scalar(ElemType::UInt(UIntKind::U8));
        // SAFETY: `new` has checked that all elements are inside the handle.
        let bytes = unsafe { TensorArg::from_raw_parts(handle.clone(), strides.into(), shape.into()) };
        let map = TensorMapArg::new(TiledArgs { tile_size: [1, 1, rows as usize, ROW_BYTES].into() }, bytes, dtype)
            .with_swizzle(TensorMapSwizzle::B128)
            .with_prefetch(TensorMapPrefetch::B256);
        without_shape(map, &handle)
    }

    pub(super) fn geometry<R: Runtime>(&self) -> HeadsGeometryLaunch<R> {
        let Strided { bound, shape, strides, .. } = &self.strided;
        let [batch, head, row, col] = strides.map(|stride| stride as u32);
        let rows = GeometryLaunch::new(shape[2] as u32, shape[3] as u32, row, col, bound.base as u32);
        HeadsGeometryLaunch::new(rows, batch, head)
    }
}

/// Strides of q, k, v, y or dy.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct HeadsGeometry {
    first: Geometry,
    batch_stride: u32,
    head_stride: u32,
}

#[cube]
impl HeadsGeometry {
    /// Positions of a head.
    pub(super) fn of(&self, batch: u32, head: u32) -> Geometry {
        self.first.after(batch * self.batch_stride + head * self.head_stride)
    }

    /// Elements of a row.
    pub(super) fn width(&self) -> u32 {
        self.first.cols
    }
}

/// Checked mask or bias.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    strided: Strided,
    pub(super) kind: Kind,
}

impl Spread {
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, view: &HeadsView) -> Result<Self, KernelError> {
        let kind = Kind::of(view.dtype)?;
        Ok(Self { strided: Strided::new(client, view, kind.per_word())?, kind })
    }

    /// Batch size and heads, each 1 if broadcast.
    pub(super) fn own(&self) -> [usize; 2] {
        [self.strided.shape[0], self.strided.shape[1]]
    }
}

/// A mask or bias in a kernel. Strides of broadcast axes are zero.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SpreadArray {
    values: ComptimeOption<Array<u32>>,
    base: u32,
    batch_stride: u32,
    head_stride: u32,
    query_stride: u32,
    key_stride: u32,
    #[cube(comptime)]
    kind: Option<Kind>,
}

impl<R: Runtime> SpreadArrayLaunch<R> {
    pub(super) fn of(spread: Option<&Spread>) -> Self {
        let Some(Spread { strided, kind }) = spread else {
            return Self::new(None.into(), 0, 0, 0, 0, 0, None);
        };
        let mut axes = strided.shape.iter().zip(strided.strides);
        let [batch, head, query, key] = [(); 4].map(|()| match axes.next() {
            Some((&size, stride)) if size > 1 => stride as u32,
            _ => 0,
        });
        Self::new(Some(strided.array()).into(), strided.bound.base as u32, batch, head, query, key, Some(*kind))
    }
}

#[cube]
impl SpreadArray {
    /// Raw bits of an element: a bool, or a float of its dtype. 0 without values.
    pub(super) fn at(&self, batch: u32, head: u32, query: u32, key: u32) -> u32 {
        let index = self.base
            + batch * self.batch_stride
            + head * self.head_stride
            + query * self.query_stride
            + key * self.key_stride;
        #[comptime]
        match &self.values {
            ComptimeOption::Some(values) => {
                let per_word = comptime!(self.kind.map_or(1, Kind::per_word));
                let word = values[(index / per_word) as usize];
                if comptime!(per_word == 1) {
                    word
                } else {
                    let bits = comptime!(32 / per_word);
                    (word >> (index % per_word * bits)) & comptime!((1u32 << bits) - 1)
                }
            }
            ComptimeOption::None => 0u32.runtime(),
        }
    }
}

/// Classes of the tiles of scores, on the device.
#[derive(Clone, Debug)]
pub(super) struct Classes {
    /// `[batch or 1, heads or 1, query tiles, key tiles]`, a [`Class`] each.
    pub(super) handle: Handle,
    /// Batch size and heads, each 1 if all have the same classes.
    pub(super) own: [usize; 2],
    /// Tiles of queries and of keys.
    pub(super) tiles: [usize; 2],
}

impl Classes {
    pub(super) fn len(&self) -> usize {
        self.own.iter().chain(&self.tiles).product()
    }
}

/// No score of the tile is visible.
pub(super) const CLASS_HIDDEN: u32 = 0;
/// Mask and documents hide nothing.
pub(super) const CLASS_WHOLE: u32 = 1;
/// Mask or documents hide a part.
pub(super) const CLASS_MIXED: u32 = 2;

/// Inputs that determine scores, apart from q and k.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Scores {
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) queries: u32,
    pub(super) keys: u32,
    pub(super) scale: f32,
    softcap: f32,
    mask: SpreadArray,
    bias: SpreadArray,
    documents: ComptimeOption<Array<u32>>,
    classes: ComptimeOption<Array<u32>>,
    class_batch_stride: u32,
    class_head_stride: u32,
    #[cube(comptime)]
    pub(super) config: HeadsConfig,
}

impl<R: Runtime> ScoresLaunch<R> {
    pub(super) fn of(problem: &CheckedHeads, classes: Option<&Classes>) -> Self {
        let ([batch, heads, queries, _], [_, kv_heads, keys, _]) = (problem.query.shape(), problem.key.shape());
        // SAFETY: documents are checked, and classes are allocated with their length.
        let array = |handle: &Handle, len| unsafe { ArrayArg::from_raw_parts(handle.clone(), len) };
        let [batch_stride, head_stride] = classes.map_or([0; 2], |Classes { own, tiles, .. }| {
            let each = tiles[0] * tiles[1];
            [if own[0] > 1 { own[1] * each } else { 0 }, if own[1] > 1 { each } else { 0 }]
        });
        Self::new(
            heads as u32,
            kv_heads as u32,
            queries as u32,
            keys as u32,
            problem.scale,
            problem.softcap,
            SpreadArrayLaunch::of(problem.mask.as_ref()),
            SpreadArrayLaunch::of(problem.bias.as_ref()),
            problem.documents.as_ref().map(|documents| array(documents, batch * keys)).into(),
            classes.map(|classes| array(&classes.handle, classes.len())).into(),
            batch_stride as u32,
            head_stride as u32,
            problem.config,
        )
    }
}

/// Rows of a head that a cube works on: a query head where scores are meant.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Item {
    /// First row.
    pub(super) row0: u32,
    pub(super) head: u32,
    pub(super) batch: u32,
}

/// A score after softcap and bias, and the derivative of softcap.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Score {
    pub(super) value: f32,
    pub(super) slope: f32,
}

/// Columns from `first` to `end`.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Span {
    pub(super) first: u32,
    pub(super) end: u32,
}

#[cube]
impl Scores {
    /// Item `number`, of `rows` rows. The last queries come first: under a causal mask they see the
    /// most keys.
    pub(super) fn item(&self, number: u32, #[comptime] rows: u32, #[comptime] of_keys: bool) -> Item {
        let (heads, count) = if comptime!(of_keys) { (self.kv_heads, self.keys) } else { (self.heads, self.queries) };
        let tiles = count.div_ceil(rows);
        let (outer, head) = (number / heads, number % heads);
        let (batch, tile) = (outer / tiles, outer % tiles);
        let tile = if comptime!(of_keys) { tile } else { tiles - 1 - tile };
        Item { row0: tile * rows, head, batch }
    }

    /// Query heads of a key head.
    pub(super) fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Columns that some of the `rows` rows from `row0` on see under the causal mask. The first
    /// query is the first one of a tile.
    pub(super) fn span(&self, row0: u32, #[comptime] rows: u32, #[comptime] of_keys: bool) -> Span {
        let (mut first, mut end) = (0u32.runtime(), if comptime!(of_keys) { self.queries } else { self.keys });
        if comptime!(self.config.causal && of_keys) {
            let sees = row0 + self.queries;
            first = (sees - min(sees, self.keys)) / TILE * TILE;
        } else if comptime!(self.config.causal) {
            let last = min(row0 + rows, self.queries) + self.keys;
            end = min(end, last - min(last, self.queries));
        }
        Span { first, end }
    }

    /// Class of the rows of a query head's item and the columns from `col` on. `size` is the number
    /// of rows and of columns.
    pub(super) fn class(&self, place: &Item, col: u32, #[comptime] size: [u32; 2], #[comptime] of_keys: bool) -> u32 {
        #[comptime]
        match &self.classes {
            ComptimeOption::Some(classes) => {
                let (rows, cols) =
                    if comptime!(of_keys) { (self.keys, self.queries) } else { (self.queries, self.keys) };
                let first = self.class_index(place, place.row0, col, of_keys);
                let mut class = classes[first as usize];
                let [down, across] = comptime!(size.map(|size| size.div_ceil(TILE)));
                #[unroll]
                for tile in 1..comptime!(down * across) {
                    let row = min(place.row0 + comptime!(tile / across * TILE), rows - 1);
                    let col = min(col + comptime!(tile % across * TILE), cols - 1);
                    let index = self.class_index(place, row, col, of_keys);
                    class = select(class == classes[index as usize], class, CLASS_MIXED);
                }
                class
            }
            ComptimeOption::None => CLASS_WHOLE.runtime(),
        }
    }

    fn class_index(&self, place: &Item, row: u32, col: u32, #[comptime] of_keys: bool) -> u32 {
        let (query, key) = if comptime!(of_keys) { (col, row) } else { (row, col) };
        let tile = query / TILE * self.keys.div_ceil(TILE) + key / TILE;
        place.batch * self.class_batch_stride + place.head * self.class_head_stride + tile
    }

    /// Whether the mask or the documents hide a key. Positions past the end repeat the last one.
    pub(super) fn is_masked(&self, batch: u32, head: u32, query: u32, key: u32) -> bool {
        let (query, key) = (min(query, self.queries - 1), min(key, self.keys - 1));
        let mut masked = false.runtime();
        if comptime!(self.config.mask.is_some()) {
            masked = self.mask.at(batch, head, query, key) != 0;
        }
        #[comptime]
        match &self.documents {
            ComptimeOption::Some(documents) => {
                let first = batch * self.keys;
                masked = masked || documents[(first + query) as usize] != documents[(first + key) as usize];
            }
            ComptimeOption::None => {}
        }
        masked
    }

    /// Score of a query and a key from their product, without masks.
    pub(super) fn score(&self, product: f32, place: &Item, query: u32, key: u32) -> Score {
        let mut value = product * self.scale;
        let mut slope = 1.0f32.runtime();
        if comptime!(self.config.softcap) {
            let tanh = (value / self.softcap).tanh();
            value = tanh * self.softcap;
            slope = 1.0f32 - tanh * tanh;
        }
        if comptime!(self.config.bias.is_some()) {
            let (query, key) = (min(query, self.queries - 1), min(key, self.keys - 1));
            let kind = comptime!(match self.config.bias {
                Some(Kind::Float(element_type)) => element_type,
                _ => ElementType::F32,
            });
            value += f32::reinterpret(widen(self.bias.at(place.batch, place.head, query, key), kind));
        }
        Score { value, slope }
    }

    /// Whether a query does not see a key, in a tile of class `class`.
    pub(super) fn is_hidden(&self, place: &Item, query: u32, key: u32, class: u32) -> bool {
        let mut hidden = key >= self.keys;
        if comptime!(self.config.causal) {
            hidden = hidden || key + self.queries > query + self.keys;
        }
        if comptime!(self.config.has_classes()) {
            if class == CLASS_MIXED {
                hidden = hidden || self.is_masked(place.batch, place.head, query, key);
            }
        }
        hidden
    }

    /// Whether queries from `query` on may not see all keys up to `last`, in a tile of class
    /// `class`.
    pub(super) fn is_partial(&self, query: u32, last: u32, class: u32) -> bool {
        let mut partial = class == CLASS_MIXED || last >= self.keys;
        if comptime!(self.config.causal) {
            partial = partial || last + self.queries > query + self.keys;
        }
        partial
    }
}
