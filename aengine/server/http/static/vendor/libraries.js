var vl=Object.create;var pr=Object.defineProperty;var Al=Object.getOwnPropertyDescriptor;var Tl=Object.getOwnPropertyNames;var Nl=Object.getPrototypeOf,Cl=Object.prototype.hasOwnProperty;var Ol=(e,t)=>()=>{try{return t||e((t={exports:{}}).exports,t),t.exports}catch(n){throw t=0,n}},Il=(e,t)=>{for(var n in t)pr(e,n,{get:t[n],enumerable:!0})},Rl=(e,t,n,r)=>{
if(t&&typeof t=="object"||typeof t=="function")for(let i of Tl(t))!Cl.call(e,i)&&i!==n&&pr(e,i,{get:()=>t[i],enumerable:!(r=Al(t,i))||r.enumerable});return e};var Dl=(e,t,n)=>(n=e!=null?vl(Nl(e)):{},Rl(t||!e||!e.__esModule?pr(n,"default",{value:e,enumerable:!0}):n,e));var uo=Ol((Sg,co)=>{function Qa(e){return e instanceof Map?e.clear=e.delete=e.set=function(){throw new Error("map is read-only")}:e instanceof Set&&(e.add=e.clear=
e.delete=function(){throw new Error("set is read-only")}),Object.freeze(e),Object.getOwnPropertyNames(e).forEach(t=>{let n=e[t],r=typeof n;(r==="object"||r==="f\
unction")&&!Object.isFrozen(n)&&Qa(n)}),e}var Cn=class{constructor(t){t.data===void 0&&(t.data={}),this.data=t.data,this.isMatchIgnored=!1}ignoreMatch(){this.isMatchIgnored=
!0}};function ja(e){return e.replace(/&/g,"&amp;").replace(/</g,"&lt;").replace(/>/g,"&gt;").replace(/"/g,"&quot;").replace(/'/g,"&#x27;")}function ht(e,...t){let n=Object.
create(null);for(let r in e)n[r]=e[r];return t.forEach(function(r){for(let i in r)n[i]=r[i]}),n}var yc="</span>",Ka=e=>!!e.scope,wc=(e,{prefix:t})=>{if(e.startsWith(
"language:"))return e.replace("language:","language-");if(e.includes(".")){let n=e.split(".");return[`${t}${n.shift()}`,...n.map((r,i)=>`${r}${"_".repeat(i+1)}`)].
join(" ")}return`${t}${e}`},br=class{constructor(t,n){this.buffer="",this.classPrefix=n.classPrefix,t.walk(this)}addText(t){this.buffer+=ja(t)}openNode(t){if(!Ka(
t))return;let n=wc(t.scope,{prefix:this.classPrefix});this.span(n)}closeNode(t){Ka(t)&&(this.buffer+=yc)}value(){return this.buffer}span(t){this.buffer+=`<span \
class="${t}">`}},Wa=(e={})=>{let t={children:[]};return Object.assign(t,e),t},xr=class e{constructor(){this.rootNode=Wa(),this.stack=[this.rootNode]}get top(){return this.
stack[this.stack.length-1]}get root(){return this.rootNode}add(t){this.top.children.push(t)}openNode(t){let n=Wa({scope:t});this.add(n),this.stack.push(n)}closeNode(){
if(this.stack.length>1)return this.stack.pop()}closeAllNodes(){for(;this.closeNode(););}toJSON(){return JSON.stringify(this.rootNode,null,4)}walk(t){return this.
constructor._walk(t,this.rootNode)}static _walk(t,n){return typeof n=="string"?t.addText(n):n.children&&(t.openNode(n),n.children.forEach(r=>this._walk(t,r)),t.
closeNode(n)),t}static _collapse(t){typeof t!="string"&&t.children&&(t.children.every(n=>typeof n=="string")?t.children=[t.children.join("")]:t.children.forEach(
n=>{e._collapse(n)}))}},yr=class extends xr{constructor(t){super(),this.options=t}addText(t){t!==""&&this.add(t)}startScope(t){this.openNode(t)}endScope(){this.
closeNode()}__addSublanguage(t,n){let r=t.root;n&&(r.scope=`language:${n}`),this.add(r)}toHTML(){return new br(this,this.options).value()}finalize(){return this.
closeAllNodes(),!0}};function tn(e){return e?typeof e=="string"?e:e.source:null}function Ja(e){return _t("(?=",e,")")}function _c(e){return _t("(?:",e,")*")}function Ec(e){
return _t("(?:",e,")?")}function _t(...e){return e.map(n=>tn(n)).join("")}function kc(e){let t=e[e.length-1];return typeof t=="object"&&t.constructor===Object?(e.
splice(e.length-1,1),t):{}}function _r(...e){return"("+(kc(e).capture?"":"?:")+e.map(r=>tn(r)).join("|")+")"}function eo(e){return new RegExp(e.toString()+"|").
exec("").length-1}function Sc(e,t){let n=e&&e.exec(t);return n&&n.index===0}var vc=/\[(?:[^\\\]]|\\.)*\]|\(\??|\\([1-9][0-9]*)|\\./;function Er(e,{joinWith:t}){
let n=0;return e.map(r=>{n+=1;let i=n,o=tn(r),a="";for(;o.length>0;){let l=vc.exec(o);if(!l){a+=o;break}a+=o.substring(0,l.index),o=o.substring(l.index+l[0].length),
l[0][0]==="\\"&&l[1]?a+="\\"+String(Number(l[1])+i):(a+=l[0],l[0]==="("&&n++)}return a}).map(r=>`(${r})`).join(t)}var Ac=/\b\B/,to="[a-zA-Z]\\w*",kr="[a-zA-Z_]\\\
w*",no="\\b\\d+(\\.\\d+)?",ro="(-?)(\\b0[xX][a-fA-F0-9]+|(\\b\\d+(\\.\\d*)?|\\.\\d+)([eE][-+]?\\d+)?)",io="\\b(0b[01]+)",Tc="!|!=|!==|%|%=|&|&&|&=|\\*|\\*=|\\+|\\+=\
|,|-|-=|/=|/|:|;|<<|<<=|<=|<|===|==|=|>>>=|>>=|>=|>>>|>>|>|\\?|\\[|\\{|\\(|\\^|\\^=|\\||\\|=|\\|\\||~",Nc=(e={})=>{let t=/^#![ ]*\//;return e.binary&&(e.begin=_t(
t,/.*\b/,e.binary,/\b.*/)),ht({scope:"meta",begin:t,end:/$/,relevance:0,"on:begin":(n,r)=>{n.index!==0&&r.ignoreMatch()}},e)},nn={begin:"\\\\[\\s\\S]",relevance:0},
Cc={scope:"string",begin:"'",end:"'",illegal:"\\n",contains:[nn]},Oc={scope:"string",begin:'"',end:'"',illegal:"\\n",contains:[nn]},Ic={begin:/\b(a|an|the|are|I'm|isn't|don't|doesn't|won't|but|just|should|pretty|simply|enough|gonna|going|wtf|so|such|will|you|your|they|like|more)\b/},
In=function(e,t,n={}){let r=ht({scope:"comment",begin:e,end:t,contains:[]},n);r.contains.push({scope:"doctag",begin:"[ ]*(?=(TODO|FIXME|NOTE|BUG|OPTIMIZE|HACK|X\
XX):)",end:/(TODO|FIXME|NOTE|BUG|OPTIMIZE|HACK|XXX):/,excludeBegin:!0,relevance:0});let i=_r("I","a","is","so","us","to","at","if","in","it","on",/[A-Za-z]+['](d|ve|re|ll|t|s|n)/,
/[A-Za-z]+[-][a-z]+/,/[A-Za-z][a-z]{2,}/);return r.contains.push({begin:_t(/[ ]+/,"(",i,/[.]?[:]?([.][ ]|[ ])/,"){3}")}),r},Rc=In("//","$"),Dc=In("/\\*","\\*/"),
Mc=In("#","$"),Lc={scope:"number",begin:no,relevance:0},Bc={scope:"number",begin:ro,relevance:0},qc={scope:"number",begin:io,relevance:0},Fc={scope:"regexp",begin:/\/(?=[^/\n]*\/)/,
end:/\/[gimuy]*/,contains:[nn,{begin:/\[/,end:/\]/,relevance:0,contains:[nn]}]},Pc={scope:"title",begin:to,relevance:0},zc={scope:"title",begin:kr,relevance:0},
Uc={begin:"\\.\\s*"+kr,relevance:0},$c=function(e){return Object.assign(e,{"on:begin":(t,n)=>{n.data._beginMatch=t[1]},"on:end":(t,n)=>{n.data._beginMatch!==t[1]&&
n.ignoreMatch()}})},Nn=Object.freeze({__proto__:null,APOS_STRING_MODE:Cc,BACKSLASH_ESCAPE:nn,BINARY_NUMBER_MODE:qc,BINARY_NUMBER_RE:io,COMMENT:In,C_BLOCK_COMMENT_MODE:Dc,
C_LINE_COMMENT_MODE:Rc,C_NUMBER_MODE:Bc,C_NUMBER_RE:ro,END_SAME_AS_BEGIN:$c,HASH_COMMENT_MODE:Mc,IDENT_RE:to,MATCH_NOTHING_RE:Ac,METHOD_GUARD:Uc,NUMBER_MODE:Lc,
NUMBER_RE:no,PHRASAL_WORDS_MODE:Ic,QUOTE_STRING_MODE:Oc,REGEXP_MODE:Fc,RE_STARTERS_RE:Tc,SHEBANG:Nc,TITLE_MODE:Pc,UNDERSCORE_IDENT_RE:kr,UNDERSCORE_TITLE_MODE:zc});
function Gc(e,t){e.input[e.index-1]==="."&&t.ignoreMatch()}function Hc(e,t){e.className!==void 0&&(e.scope=e.className,delete e.className)}function Kc(e,t){t&&e.
beginKeywords&&(e.begin="\\b("+e.beginKeywords.split(" ").join("|")+")(?!\\.)(?=\\b|\\s)",e.__beforeBegin=Gc,e.keywords=e.keywords||e.beginKeywords,delete e.beginKeywords,
e.relevance===void 0&&(e.relevance=0))}function Wc(e,t){Array.isArray(e.illegal)&&(e.illegal=_r(...e.illegal))}function Vc(e,t){if(e.match){if(e.begin||e.end)throw new Error(
"begin & end are not supported with match");e.begin=e.match,delete e.match}}function Zc(e,t){e.relevance===void 0&&(e.relevance=1)}var Yc=(e,t)=>{if(!e.beforeMatch)
return;if(e.starts)throw new Error("beforeMatch cannot be used with starts");let n=Object.assign({},e);Object.keys(e).forEach(r=>{delete e[r]}),e.keywords=n.keywords,
e.begin=_t(n.beforeMatch,Ja(n.begin)),e.starts={relevance:0,contains:[Object.assign(n,{endsParent:!0})]},e.relevance=0,delete n.beforeMatch},Xc=["of","and","for",
"in","not","or","if","then","parent","list","value"],Qc="keyword";function ao(e,t,n=Qc){let r=Object.create(null);return typeof e=="string"?i(n,e.split(" ")):Array.
isArray(e)?i(n,e):Object.keys(e).forEach(function(o){Object.assign(r,ao(e[o],t,o))}),r;function i(o,a){t&&(a=a.map(l=>l.toLowerCase())),a.forEach(function(l){let u=l.
split("|");r[u[0]]=[o,jc(u[0],u[1])]})}}function jc(e,t){return t?Number(t):Jc(e)?0:1}function Jc(e){return Xc.includes(e.toLowerCase())}var Va={},wt=e=>{console.
error(e)},Za=(e,...t)=>{console.log(`WARN: ${e}`,...t)},Ft=(e,t)=>{Va[`${e}/${t}`]||(console.log(`Deprecated as of ${e}. ${t}`),Va[`${e}/${t}`]=!0)},On=new Error;
function oo(e,t,{key:n}){let r=0,i=e[n],o={},a={};for(let l=1;l<=t.length;l++)a[l+r]=i[l],o[l+r]=!0,r+=eo(t[l-1]);e[n]=a,e[n]._emit=o,e[n]._multi=!0}function eu(e){
if(Array.isArray(e.begin)){if(e.skip||e.excludeBegin||e.returnBegin)throw wt("skip, excludeBegin, returnBegin not compatible with beginScope: {}"),On;if(typeof e.
beginScope!="object"||e.beginScope===null)throw wt("beginScope must be object"),On;oo(e,e.begin,{key:"beginScope"}),e.begin=Er(e.begin,{joinWith:""})}}function tu(e){
if(Array.isArray(e.end)){if(e.skip||e.excludeEnd||e.returnEnd)throw wt("skip, excludeEnd, returnEnd not compatible with endScope: {}"),On;if(typeof e.endScope!=
"object"||e.endScope===null)throw wt("endScope must be object"),On;oo(e,e.end,{key:"endScope"}),e.end=Er(e.end,{joinWith:""})}}function nu(e){e.scope&&typeof e.
scope=="object"&&e.scope!==null&&(e.beginScope=e.scope,delete e.scope)}function ru(e){nu(e),typeof e.beginScope=="string"&&(e.beginScope={_wrap:e.beginScope}),typeof e.
endScope=="string"&&(e.endScope={_wrap:e.endScope}),eu(e),tu(e)}function iu(e){function t(a,l){return new RegExp(tn(a),"m"+(e.case_insensitive?"i":"")+(e.unicodeRegex?
"u":"")+(l?"g":""))}class n{constructor(){this.matchIndexes={},this.regexes=[],this.matchAt=1,this.position=0}addRule(l,u){u.position=this.position++,this.matchIndexes[this.
matchAt]=u,this.regexes.push([u,l]),this.matchAt+=eo(l)+1}compile(){this.regexes.length===0&&(this.exec=()=>null);let l=this.regexes.map(u=>u[1]);this.matcherRe=
t(Er(l,{joinWith:"|"}),!0),this.lastIndex=0}exec(l){this.matcherRe.lastIndex=this.lastIndex;let u=this.matcherRe.exec(l);if(!u)return null;let d=u.findIndex((m,h)=>h>
0&&m!==void 0),p=this.matchIndexes[d];return u.splice(0,d),Object.assign(u,p)}}class r{constructor(){this.rules=[],this.multiRegexes=[],this.count=0,this.lastIndex=
0,this.regexIndex=0}getMatcher(l){if(this.multiRegexes[l])return this.multiRegexes[l];let u=new n;return this.rules.slice(l).forEach(([d,p])=>u.addRule(d,p)),u.
compile(),this.multiRegexes[l]=u,u}resumingScanAtSamePosition(){return this.regexIndex!==0}considerAll(){this.regexIndex=0}addRule(l,u){this.rules.push([l,u]),u.
type==="begin"&&this.count++}exec(l){let u=this.getMatcher(this.regexIndex);u.lastIndex=this.lastIndex;let d=u.exec(l);if(this.resumingScanAtSamePosition()&&!(d&&
d.index===this.lastIndex)){let p=this.getMatcher(0);p.lastIndex=this.lastIndex+1,d=p.exec(l)}return d&&(this.regexIndex+=d.position+1,this.regexIndex===this.count&&
this.considerAll()),d}}function i(a){let l=new r;return a.contains.forEach(u=>l.addRule(u.begin,{rule:u,type:"begin"})),a.terminatorEnd&&l.addRule(a.terminatorEnd,
{type:"end"}),a.illegal&&l.addRule(a.illegal,{type:"illegal"}),l}function o(a,l){let u=a;if(a.isCompiled)return u;[Hc,Vc,ru,Yc].forEach(p=>p(a,l)),e.compilerExtensions.
forEach(p=>p(a,l)),a.__beforeBegin=null,[Kc,Wc,Zc].forEach(p=>p(a,l)),a.isCompiled=!0;let d=null;return typeof a.keywords=="object"&&a.keywords.$pattern&&(a.keywords=
Object.assign({},a.keywords),d=a.keywords.$pattern,delete a.keywords.$pattern),d=d||/\w+/,a.keywords&&(a.keywords=ao(a.keywords,e.case_insensitive)),u.keywordPatternRe=
t(d,!0),l&&(a.begin||(a.begin=/\B|\b/),u.beginRe=t(u.begin),!a.end&&!a.endsWithParent&&(a.end=/\B|\b/),a.end&&(u.endRe=t(u.end)),u.terminatorEnd=tn(u.end)||"",a.
endsWithParent&&l.terminatorEnd&&(u.terminatorEnd+=(a.end?"|":"")+l.terminatorEnd)),a.illegal&&(u.illegalRe=t(a.illegal)),a.contains||(a.contains=[]),a.contains=
[].concat(...a.contains.map(function(p){return au(p==="self"?a:p)})),a.contains.forEach(function(p){o(p,u)}),a.starts&&o(a.starts,l),u.matcher=i(u),u}if(e.compilerExtensions||
(e.compilerExtensions=[]),e.contains&&e.contains.includes("self"))throw new Error("ERR: contains `self` is not supported at the top-level of a language.  See do\
cumentation.");return e.classNameAliases=ht(e.classNameAliases||{}),o(e)}function so(e){return e?e.endsWithParent||so(e.starts):!1}function au(e){return e.variants&&
!e.cachedVariants&&(e.cachedVariants=e.variants.map(function(t){return ht(e,{variants:null},t)})),e.cachedVariants?e.cachedVariants:so(e)?ht(e,{starts:e.starts?
ht(e.starts):null}):Object.isFrozen(e)?ht(e):e}var ou="11.11.2",wr=class extends Error{constructor(t,n){super(t),this.name="HTMLInjectionError",this.html=n}},gr=ja,
Ya=ht,Xa=Symbol("nomatch"),su=7,lo=function(e){let t=Object.create(null),n=Object.create(null),r=[],i=!0,o="Could not find the language '{}', did you forget to \
load/include a language module?",a={disableAutodetect:!0,name:"Plain text",contains:[]},l={ignoreUnescapedHTML:!1,throwUnescapedHTML:!1,noHighlightRe:/^(no-?highlight)$/i,
languageDetectRe:/\blang(?:uage)?-([\w-]+)\b/i,classPrefix:"hljs-",cssSelector:"pre code",languages:null,__emitter:yr};function u(R){return l.noHighlightRe.test(
R)}function d(R){let P=R.className+" ";P+=R.parentNode?R.parentNode.className:"";let G=l.languageDetectRe.exec(P);if(G){let ne=Y(G[1]);return ne||(Za(o.replace(
"{}",G[1])),Za("Falling back to no-highlight mode for this block.",R)),ne?G[1]:"no-highlight"}return P.split(/\s+/).find(ne=>u(ne)||Y(ne))}function p(R,P,G){let ne="",
y="";typeof P=="object"?(ne=R,G=P.ignoreIllegals,y=P.language):(Ft("10.7.0","highlight(lang, code, ...args) has been deprecated."),Ft("10.7.0",`Please use highl\
ight(code, options) instead.
https://github.com/highlightjs/highlight.js/issues/2277`),y=R,ne=P),G===void 0&&(G=!0);let le={code:ne,language:y};j("before:highlight",le);let de=le.result?le.
result:m(le.language,le.code,G);return de.code=le.code,j("after:highlight",de),de}function m(R,P,G,ne){let y=Object.create(null);function le(H,k){return H.keywords[k]}
function de(){if(!re.keywords){Ae.addText(fe);return}let H=0;re.keywordPatternRe.lastIndex=0;let k=re.keywordPatternRe.exec(fe),M="";for(;k;){M+=fe.substring(H,
k.index);let K=Pe.case_insensitive?k[0].toLowerCase():k[0],J=le(re,K);if(J){let[ye,be]=J;if(Ae.addText(M),M="",y[K]=(y[K]||0)+1,y[K]<=su&&(Mt+=be),ye.startsWith(
"_"))M+=k[0];else{let De=Pe.classNameAliases[ye]||ye;ve(k[0],De)}}else M+=k[0];H=re.keywordPatternRe.lastIndex,k=re.keywordPatternRe.exec(fe)}M+=fe.substring(H),
Ae.addText(M)}function w(){if(fe==="")return;let H=null;if(typeof re.subLanguage=="string"){if(!t[re.subLanguage]){Ae.addText(fe);return}H=m(re.subLanguage,fe,!0,
Dt[re.subLanguage]),Dt[re.subLanguage]=H._top}else H=f(fe,re.subLanguage.length?re.subLanguage:null);re.relevance>0&&(Mt+=H.relevance),Ae.__addSublanguage(H._emitter,
H.language)}function he(){re.subLanguage!=null?w():de(),fe=""}function ve(H,k){H!==""&&(Ae.startScope(k),Ae.addText(H),Ae.endScope())}function Ve(H,k){let M=1,K=k.
length-1;for(;M<=K;){if(!H._emit[M]){M++;continue}let J=Pe.classNameAliases[H[M]]||H[M],ye=k[M];J?ve(ye,J):(fe=ye,de(),fe=""),M++}}function ot(H,k){return H.scope&&
typeof H.scope=="string"&&Ae.openNode(Pe.classNameAliases[H.scope]||H.scope),H.beginScope&&(H.beginScope._wrap?(ve(fe,Pe.classNameAliases[H.beginScope._wrap]||H.
beginScope._wrap),fe=""):H.beginScope._multi&&(Ve(H.beginScope,k),fe="")),re=Object.create(H,{parent:{value:re}}),re}function _e(H,k,M){let K=Sc(H.endRe,M);if(K){
if(H["on:end"]){let J=new Cn(H);H["on:end"](k,J),J.isMatchIgnored&&(K=!1)}if(K){for(;H.endsParent&&H.parent;)H=H.parent;return H}}if(H.endsWithParent)return _e(
H.parent,k,M)}function st(H){return re.matcher.regexIndex===0?(fe+=H[0],1):(Xt=!0,0)}function Ue(H){let k=H[0],M=H.rule,K=new Cn(M),J=[M.__beforeBegin,M["on:beg\
in"]];for(let ye of J)if(ye&&(ye(H,K),K.isMatchIgnored))return st(k);return M.skip?fe+=k:(M.excludeBegin&&(fe+=k),he(),!M.returnBegin&&!M.excludeBegin&&(fe=k)),
ot(M,H),M.returnBegin?0:k.length}function Qe(H){let k=H[0],M=P.substring(H.index),K=_e(re,H,M);if(!K)return Xa;let J=re;re.endScope&&re.endScope._wrap?(he(),ve(
k,re.endScope._wrap)):re.endScope&&re.endScope._multi?(he(),Ve(re.endScope,H)):J.skip?fe+=k:(J.returnEnd||J.excludeEnd||(fe+=k),he(),J.excludeEnd&&(fe=k));do re.
scope&&Ae.closeNode(),!re.skip&&!re.subLanguage&&(Mt+=re.relevance),re=re.parent;while(re!==K.parent);return K.starts&&ot(K.starts,H),J.returnEnd?0:k.length}function Ze(){
let H=[];for(let k=re;k!==Pe;k=k.parent)k.scope&&H.unshift(k.scope);H.forEach(k=>Ae.openNode(k))}let je={};function Rt(H,k){let M=k&&k[0];if(fe+=H,M==null)return he(),
0;if(je.type==="begin"&&k.type==="end"&&je.index===k.index&&M===""){if(fe+=P.slice(k.index,k.index+1),!i){let K=new Error(`0 width match regex (${R})`);throw K.
languageName=R,K.badRule=je.rule,K}return 1}if(je=k,k.type==="begin")return Ue(k);if(k.type==="illegal"&&!G){let K=new Error('Illegal lexeme "'+M+'" for mode "'+
(re.scope||"<unnamed>")+'"');throw K.mode=re,K}else if(k.type==="end"){let K=Qe(k);if(K!==Xa)return K}if(k.type==="illegal"&&M==="")return k.index===P.length||(fe+=
`
`),1;if(Yt>1e5&&Yt>k.index*3)throw new Error("potential infinite loop, way more iterations than matches");return fe+=M,M.length}let Pe=Y(R);if(!Pe)throw wt(o.replace(
"{}",R)),new Error('Unknown language: "'+R+'"');let me=iu(Pe),Ye="",re=ne||me,Dt={},Ae=new l.__emitter(l);Ze();let fe="",Mt=0,lt=0,Yt=0,Xt=!1;try{if(Pe.__emitTokens)
Pe.__emitTokens(P,Ae);else{for(re.matcher.considerAll();;){Yt++,Xt?Xt=!1:re.matcher.considerAll(),re.matcher.lastIndex=lt;let H=re.matcher.exec(P);if(!H)break;let k=P.
substring(lt,H.index),M=Rt(k,H);lt=H.index+M}Rt(P.substring(lt))}return Ae.finalize(),Ye=Ae.toHTML(),{language:R,value:Ye,relevance:Mt,illegal:!1,_emitter:Ae,_top:re}}catch(H){
if(H.message&&H.message.includes("Illegal"))return{language:R,value:gr(P),illegal:!0,relevance:0,_illegalBy:{message:H.message,index:lt,context:P.slice(lt-100,lt+
100),mode:H.mode,resultSoFar:Ye},_emitter:Ae};if(i)return{language:R,value:gr(P),illegal:!1,relevance:0,errorRaised:H,_emitter:Ae,_top:re};throw H}}function h(R){
let P={value:gr(R),illegal:!1,relevance:0,_top:a,_emitter:new l.__emitter(l)};return P._emitter.addText(R),P}function f(R,P){P=P||l.languages||Object.keys(t);let G=h(
R),ne=P.filter(Y).filter(O).map(he=>m(he,R,!1));ne.unshift(G);let y=ne.sort((he,ve)=>{if(he.relevance!==ve.relevance)return ve.relevance-he.relevance;if(he.language&&
ve.language){if(Y(he.language).supersetOf===ve.language)return 1;if(Y(ve.language).supersetOf===he.language)return-1}return 0}),[le,de]=y,w=le;return w.secondBest=
de,w}function _(R,P,G){let ne=P&&n[P]||G;R.classList.add("hljs"),R.classList.add(`language-${ne}`)}function C(R){let P=null,G=d(R);if(u(G))return;if(j("before:h\
ighlightElement",{el:R,language:G}),R.dataset.highlighted){console.log("Element previously highlighted. To highlight again, first unset `dataset.highlighted`.",
R);return}if(R.children.length>0&&(l.ignoreUnescapedHTML||(console.warn("One of your code blocks includes unescaped HTML. This is a potentially serious security\
 risk."),console.warn("https://github.com/highlightjs/highlight.js/wiki/security"),console.warn("The element with unescaped HTML:"),console.warn(R)),l.throwUnescapedHTML))
throw new wr("One of your code blocks includes unescaped HTML.",R.innerHTML);P=R;let ne=P.textContent,y=G?p(ne,{language:G,ignoreIllegals:!0}):f(ne);R.innerHTML=
y.value,R.dataset.highlighted="yes",_(R,G,y.language),R.result={language:y.language,re:y.relevance,relevance:y.relevance},y.secondBest&&(R.secondBest={language:y.
secondBest.language,relevance:y.secondBest.relevance}),j("after:highlightElement",{el:R,result:y,text:ne})}function T(R){l=Ya(l,R)}let E=()=>{q(),Ft("10.6.0","i\
nitHighlighting() deprecated.  Use highlightAll() now.")};function v(){q(),Ft("10.6.0","initHighlightingOnLoad() deprecated.  Use highlightAll() now.")}let D=!1;
function q(){function R(){q()}if(document.readyState==="loading"){D||window.addEventListener("DOMContentLoaded",R,!1),D=!0;return}document.querySelectorAll(l.cssSelector).
forEach(C)}function z(R,P){let G=null;try{G=P(e)}catch(ne){if(wt("Language definition for '{}' could not be registered.".replace("{}",R)),i)wt(ne);else throw ne;
G=a}G.name||(G.name=R),t[R]=G,G.rawDefinition=P.bind(null,e),G.aliases&&X(G.aliases,{languageName:R})}function A(R){delete t[R];for(let P of Object.keys(n))n[P]===
R&&delete n[P]}function Z(){return Object.keys(t)}function Y(R){return R=(R||"").toLowerCase(),t[R]||t[n[R]]}function X(R,{languageName:P}){typeof R=="string"&&
(R=[R]),R.forEach(G=>{n[G.toLowerCase()]=P})}function O(R){let P=Y(R);return P&&!P.disableAutodetect}function oe(R){R["before:highlightBlock"]&&!R["before:highl\
ightElement"]&&(R["before:highlightElement"]=P=>{R["before:highlightBlock"](Object.assign({block:P.el},P))}),R["after:highlightBlock"]&&!R["after:highlightEleme\
nt"]&&(R["after:highlightElement"]=P=>{R["after:highlightBlock"](Object.assign({block:P.el},P))})}function ie(R){oe(R),r.push(R)}function W(R){let P=r.indexOf(R);
P!==-1&&r.splice(P,1)}function j(R,P){let G=R;r.forEach(function(ne){ne[G]&&ne[G](P)})}function Q(R){return Ft("10.7.0","highlightBlock will be removed entirely\
 in v12.0"),Ft("10.7.0","Please use highlightElement now."),C(R)}Object.assign(e,{highlight:p,highlightAuto:f,highlightAll:q,highlightElement:C,highlightBlock:Q,
configure:T,initHighlighting:E,initHighlightingOnLoad:v,registerLanguage:z,unregisterLanguage:A,listLanguages:Z,getLanguage:Y,registerAliases:X,autoDetection:O,
inherit:Ya,addPlugin:ie,removePlugin:W}),e.debugMode=function(){i=!1},e.safeMode=function(){i=!0},e.versionString=ou,e.regex={concat:_t,lookahead:Ja,either:_r,optional:Ec,
anyNumberOfTimes:_c};for(let R in Nn)typeof Nn[R]=="object"&&Qa(Nn[R]);return Object.assign(e,Nn),e},Pt=lo({});Pt.newInstance=()=>lo({});co.exports=Pt;Pt.HighlightJS=
Pt;Pt.default=Pt});function Ml(e){let t=e.regex,n=e.COMMENT("//","$",{contains:[{begin:/\\\n/}]}),r="decltype\\(auto\\)",i="[a-zA-Z_]\\w*::",a="(?!struct)("+r+"|"+t.optional(i)+"[\
a-zA-Z_]\\w*"+t.optional("<[^<>]+>")+")",l={className:"type",begin:"\\b[a-z\\d_]*_t\\b"},d={className:"string",variants:[{begin:'(u8?|U|L)?"',end:'"',illegal:"\\\
n",contains:[e.BACKSLASH_ESCAPE]},{begin:"(u8?|U|L)?'("+"\\\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4,8}|[0-7]{3}|\\S)"+"|.)",end:"'",illegal:"."},e.END_SAME_AS_BEGIN({begin:/(?:u8?|U|L)?R"([^()\\ ]{0,16})\(/,
end:/\)([^()\\ ]{0,16})"/})]},p={className:"number",variants:[{begin:"[+-]?(?:(?:[0-9](?:'?[0-9])*\\.(?:[0-9](?:'?[0-9])*)?|\\.[0-9](?:'?[0-9])*)(?:[Ee][+-]?[0-9]\
(?:'?[0-9])*)?|[0-9](?:'?[0-9])*[Ee][+-]?[0-9](?:'?[0-9])*|0[Xx](?:[0-9A-Fa-f](?:'?[0-9A-Fa-f])*(?:\\.(?:[0-9A-Fa-f](?:'?[0-9A-Fa-f])*)?)?|\\.[0-9A-Fa-f](?:'?[0-9\
A-Fa-f])*)[Pp][+-]?[0-9](?:'?[0-9])*)(?:[Ff](?:16|32|64|128)?|(BF|bf)16|[Ll]|)"},{begin:"[+-]?\\b(?:0[Bb][01](?:'?[01])*|0[Xx][0-9A-Fa-f](?:'?[0-9A-Fa-f])*|0(?:'\
?[0-7])*|[1-9](?:'?[0-9])*)(?:[Uu](?:LL?|ll?)|[Uu][Zz]?|(?:LL?|ll?)[Uu]?|[Zz][Uu]|)"}],relevance:0},m={className:"meta",begin:/#\s*[a-z]+\b/,end:/$/,keywords:{keyword:"\
if else elif endif define undef warning error line pragma _Pragma ifdef ifndef include"},contains:[{begin:/\\\n/,relevance:0},e.inherit(d,{className:"string"}),
{className:"string",begin:/<.*?>/},n,e.C_BLOCK_COMMENT_MODE]},h={className:"title",begin:t.optional(i)+e.IDENT_RE,relevance:0},f=t.optional(i)+e.IDENT_RE+"\\s*\\(",
_=["alignas","alignof","and","and_eq","asm","atomic_cancel","atomic_commit","atomic_noexcept","auto","bitand","bitor","break","case","catch","class","co_await",
"co_return","co_yield","compl","concept","const_cast|10","consteval","constexpr","constinit","continue","decltype","default","delete","do","dynamic_cast|10","el\
se","enum","explicit","export","extern","false","final","for","friend","goto","if","import","inline","module","mutable","namespace","new","noexcept","not","not_\
eq","nullptr","operator","or","or_eq","override","private","protected","public","reflexpr","register","reinterpret_cast|10","requires","return","sizeof","static\
_assert","static_cast|10","struct","switch","synchronized","template","this","thread_local","throw","transaction_safe","transaction_safe_dynamic","true","try","\
typedef","typeid","typename","union","using","virtual","volatile","while","xor","xor_eq"],C=["bool","char","char16_t","char32_t","char8_t","double","float","int",
"long","short","void","wchar_t","unsigned","signed","const","static"],T=["any","auto_ptr","barrier","binary_semaphore","bitset","complex","condition_variable","\
condition_variable_any","counting_semaphore","deque","false_type","flat_map","flat_set","future","imaginary","initializer_list","istringstream","jthread","latch",
"lock_guard","multimap","multiset","mutex","optional","ostringstream","packaged_task","pair","promise","priority_queue","queue","recursive_mutex","recursive_tim\
ed_mutex","scoped_lock","set","shared_future","shared_lock","shared_mutex","shared_timed_mutex","shared_ptr","stack","string_view","stringstream","timed_mutex",
"thread","true_type","tuple","unique_lock","unique_ptr","unordered_map","unordered_multimap","unordered_multiset","unordered_set","variant","vector","weak_ptr",
"wstring","wstring_view"],E=["abort","abs","acos","apply","as_const","asin","atan","atan2","calloc","ceil","cerr","cin","clog","cos","cosh","cout","declval","en\
dl","exchange","exit","exp","fabs","floor","fmod","forward","fprintf","fputs","free","frexp","fscanf","future","invoke","isalnum","isalpha","iscntrl","isdigit",
"isgraph","islower","isprint","ispunct","isspace","isupper","isxdigit","labs","launder","ldexp","log","log10","make_pair","make_shared","make_shared_for_overwri\
te","make_tuple","make_unique","malloc","memchr","memcmp","memcpy","memset","modf","move","pow","printf","putchar","puts","realloc","scanf","sin","sinh","snprin\
tf","sprintf","sqrt","sscanf","std","stderr","stdin","stdout","strcat","strchr","strcmp","strcpy","strcspn","strlen","strncat","strncmp","strncpy","strpbrk","st\
rrchr","strspn","strstr","swap","tan","tanh","terminate","to_underlying","tolower","toupper","vfprintf","visit","vprintf","vsprintf"],q={type:C,keyword:_,literal:[
"NULL","false","nullopt","nullptr","true"],built_in:["_Pragma"],_type_hints:T},z={className:"function.dispatch",relevance:0,keywords:{_hint:E},begin:t.concat(/\b/,
`(?!${_.join("|")})`,e.IDENT_RE,t.lookahead(/(<[^<>]+>|)\s*\(/))},A=[z,m,l,n,e.C_BLOCK_COMMENT_MODE,p,d],Z={variants:[{begin:/=/,end:/;/},{begin:/\(/,end:/\)/},
{beginKeywords:"new throw return else",end:/;/}],keywords:q,contains:A.concat([{begin:/\(/,end:/\)/,keywords:q,contains:A.concat(["self"]),relevance:0}]),relevance:0},
Y={className:"function",begin:"("+a+"[\\*&\\s]+)+"+f,returnBegin:!0,end:/[{;=]/,excludeEnd:!0,keywords:q,illegal:/[^\w\s\*&:<>.]/,contains:[{begin:r,keywords:q,
relevance:0},{begin:f,returnBegin:!0,contains:[h],relevance:0},{begin:/::/,relevance:0},{begin:/:/,endsWithParent:!0,contains:[d,p]},{relevance:0,match:/,/},{className:"\
params",begin:/\(/,end:/\)/,keywords:q,relevance:0,contains:[n,e.C_BLOCK_COMMENT_MODE,d,p,l,{begin:/\(/,end:/\)/,keywords:q,relevance:0,contains:["self",n,e.C_BLOCK_COMMENT_MODE,
d,p,l]}]},l,n,e.C_BLOCK_COMMENT_MODE,m]};return{name:"C++",aliases:["cc","c++","h++","hpp","hh","hxx","cxx"],keywords:q,illegal:"</",classNameAliases:{"function\
.dispatch":"built_in"},contains:[].concat(Z,Y,z,A,[m,{begin:"\\b(deque|list|queue|priority_queue|pair|stack|vector|map|set|bitset|multiset|multimap|unordered_map\
|unordered_set|unordered_multiset|unordered_multimap|array|tuple|optional|variant|function|flat_map|flat_set)\\s*<(?!<)",end:">",keywords:q,contains:["self",l]},
{begin:e.IDENT_RE+"::",keywords:q},{match:[/\b(?:enum(?:\s+(?:class|struct))?|class|struct|union)/,/\s+/,/\w+/],className:{1:"keyword",3:"title.class"}}])}}function Pi(e){
let t={type:["boolean","byte","word","String"],built_in:["KeyboardController","MouseController","SoftwareSerial","EthernetServer","EthernetClient","LiquidCrysta\
l","RobotControl","GSMVoiceCall","EthernetUDP","EsploraTFT","HttpClient","RobotMotor","WiFiClient","GSMScanner","FileSystem","Scheduler","GSMServer","YunClient",
"YunServer","IPAddress","GSMClient","GSMModem","Keyboard","Ethernet","Console","GSMBand","Esplora","Stepper","Process","WiFiUDP","GSM_SMS","Mailbox","USBHost","\
Firmata","PImage","Client","Server","GSMPIN","FileIO","Bridge","Serial","EEPROM","Stream","Mouse","Audio","Servo","File","Task","GPRS","WiFi","Wire","TFT","GSM",
"SPI","SD"],_hints:["setup","loop","runShellCommandAsynchronously","analogWriteResolution","retrieveCallingNumber","printFirmwareVersion","analogReadResolution",
"sendDigitalPortPair","noListenOnLocalhost","readJoystickButton","setFirmwareVersion","readJoystickSwitch","scrollDisplayRight","getVoiceCallStatus","scrollDisp\
layLeft","writeMicroseconds","delayMicroseconds","beginTransmission","getSignalStrength","runAsynchronously","getAsynchronously","listenOnLocalhost","getCurrent\
Carrier","readAccelerometer","messageAvailable","sendDigitalPorts","lineFollowConfig","countryNameWrite","runShellCommand","readStringUntil","rewindDirectory","\
readTemperature","setClockDivider","readLightSensor","endTransmission","analogReference","detachInterrupt","countryNameRead","attachInterrupt","encryptionType",
"readBytesUntil","robotNameWrite","readMicrophone","robotNameRead","cityNameWrite","userNameWrite","readJoystickY","readJoystickX","mouseReleased","openNextFile",
"scanNetworks","noInterrupts","digitalWrite","beginSpeaker","mousePressed","isActionDone","mouseDragged","displayLogos","noAutoscroll","addParameter","remoteNum\
ber","getModifiers","keyboardRead","userNameRead","waitContinue","processInput","parseCommand","printVersion","readNetworks","writeMessage","blinkVersion","city\
NameRead","readMessage","setDataMode","parsePacket","isListening","setBitOrder","beginPacket","isDirectory","motorsWrite","drawCompass","digitalRead","clearScre\
en","serialEvent","rightToLeft","setTextSize","leftToRight","requestFrom","keyReleased","compassRead","analogWrite","interrupts","WiFiServer","disconnect","play\
Melody","parseFloat","autoscroll","getPINUsed","setPINUsed","setTimeout","sendAnalog","readSlider","analogRead","beginWrite","createChar","motorsStop","keyPress\
ed","tempoWrite","readButton","subnetMask","debugPrint","macAddress","writeGreen","randomSeed","attachGPRS","readString","sendString","remotePort","releaseAll",
"mouseMoved","background","getXChange","getYChange","answerCall","getResult","voiceCall","endPacket","constrain","getSocket","writeJSON","getButton","available",
"connected","findUntil","readBytes","exitValue","readGreen","writeBlue","startLoop","IPAddress","isPressed","sendSysex","pauseMode","gatewayIP","setCursor","get\
OemKey","tuneWrite","noDisplay","loadImage","switchPIN","onRequest","onReceive","changePIN","playFile","noBuffer","parseInt","overflow","checkPIN","knobRead","b\
eginTFT","bitClear","updateIR","bitWrite","position","writeRGB","highByte","writeRed","setSpeed","readBlue","noStroke","remoteIP","transfer","shutdown","hangCal\
l","beginSMS","endWrite","attached","maintain","noCursor","checkReg","checkPUK","shiftOut","isValid","shiftIn","pulseIn","connect","println","localIP","pinMode",
"getIMEI","display","noBlink","process","getBand","running","beginSD","drawBMP","lowByte","setBand","release","bitRead","prepare","pointTo","readRed","setMode",
"noFill","remove","listen","stroke","detach","attach","noTone","exists","buffer","height","bitSet","circle","config","cursor","random","IRread","setDNS","endSMS",
"getKey","micros","millis","begin","print","write","ready","flush","width","isPIN","blink","clear","press","mkdir","rmdir","close","point","yield","image","BSSI\
D","click","delay","read","text","move","peek","beep","rect","line","open","seek","fill","size","turn","stop","home","find","step","tone","sqrt","RSSI","SSID","\
end","bit","tan","cos","sin","pow","map","abs","max","min","get","run","put"],literal:["DIGITAL_MESSAGE","FIRMATA_STRING","ANALOG_MESSAGE","REPORT_DIGITAL","REP\
ORT_ANALOG","INPUT_PULLUP","SET_PIN_MODE","INTERNAL2V56","SYSTEM_RESET","LED_BUILTIN","INTERNAL1V1","SYSEX_START","INTERNAL","EXTERNAL","DEFAULT","OUTPUT","INPU\
T","HIGH","LOW"]},n=Ml(e),r=n.keywords;return r.type=[...r.type,...t.type],r.literal=[...r.literal,...t.literal],r.built_in=[...r.built_in,...t.built_in],r._hints=
t._hints,n.name="Arduino",n.aliases=["ino"],n.supersetOf="cpp",n}function zi(e){let t=e.regex,n={},r={begin:/\$\{/,end:/\}/,contains:["self",{begin:/:-/,contains:[n]}]};Object.assign(n,{className:"variable",variants:[{begin:t.
concat(/\$[\w\d#@][\w\d_]*/,"(?![\\w\\d])(?![$])")},r]});let i={className:"subst",begin:/\$\(/,end:/\)/,contains:[e.BACKSLASH_ESCAPE]},o=e.inherit(e.COMMENT(),{
match:[/(^|\s)/,/#.*$/],scope:{2:"comment"}}),a={begin:/<<-?\s*(?=\w+)/,starts:{contains:[e.END_SAME_AS_BEGIN({begin:/(\w+)/,end:/(\w+)/,className:"string"})]}},
l={className:"string",begin:/"/,end:/"/,contains:[e.BACKSLASH_ESCAPE,n,i]};i.contains.push(l);let u={match:/\\"/},d={className:"string",begin:/'/,end:/'/},p={match:/\\'/},
m={begin:/\$?\(\(/,end:/\)\)/,contains:[{begin:/\d+#[0-9a-f]+/,className:"number"},e.NUMBER_MODE,n]},h=["fish","bash","zsh","sh","csh","ksh","tcsh","dash","scsh"],
f=e.SHEBANG({binary:`(${h.join("|")})`,relevance:10}),_={className:"function",begin:/\w[\w\d_]*\s*\(\s*\)\s*\{/,returnBegin:!0,contains:[e.inherit(e.TITLE_MODE,
{begin:/\w[\w\d_]*/})],relevance:0},C=["if","then","else","elif","fi","time","for","while","until","in","do","done","case","esac","coproc","function","select"],
T=["true","false"],E={match:/(\/[a-z._-]+)+/},v=["break","cd","continue","eval","exec","exit","export","getopts","hash","pwd","readonly","return","shift","test",
"times","trap","umask","unset"],D=["alias","bind","builtin","caller","command","declare","echo","enable","help","let","local","logout","mapfile","printf","read",
"readarray","source","sudo","type","typeset","ulimit","unalias"],q=["autoload","bg","bindkey","bye","cap","chdir","clone","comparguments","compcall","compctl","\
compdescribe","compfiles","compgroups","compquote","comptags","comptry","compvalues","dirs","disable","disown","echotc","echoti","emulate","fc","fg","float","fu\
nctions","getcap","getln","history","integer","jobs","kill","limit","log","noglob","popd","print","pushd","pushln","rehash","sched","setcap","setopt","stat","su\
spend","ttyctl","unfunction","unhash","unlimit","unsetopt","vared","wait","whence","where","which","zcompile","zformat","zftp","zle","zmodload","zparseopts","zp\
rof","zpty","zregexparse","zsocket","zstyle","ztcp"],z=["chcon","chgrp","chown","chmod","cp","dd","df","dir","dircolors","ln","ls","mkdir","mkfifo","mknod","mkt\
emp","mv","realpath","rm","rmdir","shred","sync","touch","truncate","vdir","b2sum","base32","base64","cat","cksum","comm","csplit","cut","expand","fmt","fold","\
head","join","md5sum","nl","numfmt","od","paste","ptx","pr","sha1sum","sha224sum","sha256sum","sha384sum","sha512sum","shuf","sort","split","sum","tac","tail","\
tr","tsort","unexpand","uniq","wc","arch","basename","chroot","date","dirname","du","echo","env","expr","factor","groups","hostid","id","link","logname","nice",
"nohup","nproc","pathchk","pinky","printenv","printf","pwd","readlink","runcon","seq","sleep","stat","stdbuf","stty","tee","test","timeout","tty","uname","unlin\
k","uptime","users","who","whoami","yes"];return{name:"Bash",aliases:["sh","zsh"],keywords:{$pattern:/\b[a-z][a-z0-9._-]+\b/,keyword:C,literal:T,built_in:[...v,
...D,"set","shopt",...q,...z]},contains:[f,e.SHEBANG(),_,m,o,a,E,l,u,d,p,n]}}function Ui(e){let t=e.regex,n=e.COMMENT("//","$",{contains:[{begin:/\\\n/}]}),r="decltype\\(auto\\)",i="[a-zA-Z_]\\w*::",a="("+r+"|"+t.optional(i)+"[a-zA-Z_]\\w\
*"+t.optional("<[^<>]+>")+")",l={className:"type",variants:[{begin:"\\b[a-z\\d_]*_t\\b"},{match:/\batomic_[a-z]{3,6}\b/}]},d={className:"string",variants:[{begin:'\
(u8?|U|L)?"',end:'"',illegal:"\\n",contains:[e.BACKSLASH_ESCAPE]},{begin:"(u8?|U|L)?'("+"\\\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4,8}|[0-7]{3}|\\S)"+"|.)",end:"'",illegal:"\
."},e.END_SAME_AS_BEGIN({begin:/(?:u8?|U|L)?R"([^()\\ ]{0,16})\(/,end:/\)([^()\\ ]{0,16})"/})]},p={className:"number",variants:[{match:/\b(0b[01']+)/},{match:/(-?)\b([\d']+(\.[\d']*)?|\.[\d']+)((ll|LL|l|L)(u|U)?|(u|U)(ll|LL|l|L)?|f|F|b|B)/},
{match:/(-?)\b(0[xX][a-fA-F0-9]+(?:'[a-fA-F0-9]+)*(?:\.[a-fA-F0-9]*(?:'[a-fA-F0-9]*)*)?(?:[pP][-+]?[0-9]+)?(l|L)?(u|U)?)/},{match:/(-?)\b\d+(?:'\d+)*(?:\.\d*(?:'\d*)*)?(?:[eE][-+]?\d+)?/}],
relevance:0},m={className:"meta",begin:/#\s*[a-z]+\b/,end:/$/,keywords:{keyword:"if else elif endif define undef warning error line pragma _Pragma ifdef ifndef \
elifdef elifndef include"},contains:[{begin:/\\\n/,relevance:0},e.inherit(d,{className:"string"}),{className:"string",begin:/<.*?>/},n,e.C_BLOCK_COMMENT_MODE]},
h={className:"title",begin:t.optional(i)+e.IDENT_RE,relevance:0},f=t.optional(i)+e.IDENT_RE+"\\s*\\(",T={keyword:["asm","auto","break","case","continue","defaul\
t","do","else","enum","extern","for","fortran","goto","if","inline","register","restrict","return","sizeof","typeof","typeof_unqual","struct","switch","typedef",
"union","volatile","while","_Alignas","_Alignof","_Atomic","_Generic","_Noreturn","_Static_assert","_Thread_local","alignas","alignof","noreturn","static_assert",
"thread_local","_Pragma"],type:["float","double","signed","unsigned","int","short","long","char","void","_Bool","_BitInt","_Complex","_Imaginary","_Decimal32","\
_Decimal64","_Decimal96","_Decimal128","_Decimal64x","_Decimal128x","_Float16","_Float32","_Float64","_Float128","_Float32x","_Float64x","_Float128x","const","s\
tatic","constexpr","complex","bool","imaginary"],literal:"true false NULL",built_in:"std string wstring cin cout cerr clog stdin stdout stderr stringstream istr\
ingstream ostringstream auto_ptr deque list queue stack vector map set pair bitset multiset multimap unordered_set unordered_map unordered_multiset unordered_mu\
ltimap priority_queue make_pair array shared_ptr abort terminate abs acos asin atan2 atan calloc ceil cosh cos exit exp fabs floor fmod fprintf fputs free frexp\
 fscanf future isalnum isalpha iscntrl isdigit isgraph islower isprint ispunct isspace isupper isxdigit tolower toupper labs ldexp log10 log malloc realloc memc\
hr memcmp memcpy memset modf pow printf putchar puts scanf sinh sin snprintf sprintf sqrt sscanf strcat strchr strcmp strcpy strcspn strlen strncat strncmp strn\
cpy strpbrk strrchr strspn strstr tanh tan vfprintf vprintf vsprintf endl initializer_list unique_ptr"},E=[m,l,n,e.C_BLOCK_COMMENT_MODE,p,d],v={variants:[{begin:/=/,
end:/;/},{begin:/\(/,end:/\)/},{beginKeywords:"new throw return else",end:/;/}],keywords:T,contains:E.concat([{begin:/\(/,end:/\)/,keywords:T,contains:E.concat(
["self"]),relevance:0}]),relevance:0},D={begin:"("+a+"[\\*&\\s]+)+"+f,returnBegin:!0,end:/[{;=]/,excludeEnd:!0,keywords:T,illegal:/[^\w\s\*&:<>.]/,contains:[{begin:r,
keywords:T,relevance:0},{begin:f,returnBegin:!0,contains:[e.inherit(h,{className:"title.function"})],relevance:0},{relevance:0,match:/,/},{className:"params",begin:/\(/,
end:/\)/,keywords:T,relevance:0,contains:[n,e.C_BLOCK_COMMENT_MODE,d,p,l,{begin:/\(/,end:/\)/,keywords:T,relevance:0,contains:["self",n,e.C_BLOCK_COMMENT_MODE,d,
p,l]}]},l,n,e.C_BLOCK_COMMENT_MODE,m]};return{name:"C",aliases:["h"],keywords:T,disableAutodetect:!0,illegal:"</",contains:[].concat(v,D,E,[m,{begin:e.IDENT_RE+
"::",keywords:T},{className:"class",beginKeywords:"enum class struct union",end:/[{;:<>=]/,contains:[{beginKeywords:"final class struct"},e.TITLE_MODE]}]),exports:{
preprocessor:m,strings:d,keywords:T}}}function $i(e){let t=e.regex,n=e.COMMENT("//","$",{contains:[{begin:/\\\n/}]}),r="decltype\\(auto\\)",i="[a-zA-Z_]\\w*::",a="(?!struct)("+r+"|"+t.optional(i)+"[\
a-zA-Z_]\\w*"+t.optional("<[^<>]+>")+")",l={className:"type",begin:"\\b[a-z\\d_]*_t\\b"},d={className:"string",variants:[{begin:'(u8?|U|L)?"',end:'"',illegal:"\\\
n",contains:[e.BACKSLASH_ESCAPE]},{begin:"(u8?|U|L)?'("+"\\\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4,8}|[0-7]{3}|\\S)"+"|.)",end:"'",illegal:"."},e.END_SAME_AS_BEGIN({begin:/(?:u8?|U|L)?R"([^()\\ ]{0,16})\(/,
end:/\)([^()\\ ]{0,16})"/})]},p={className:"number",variants:[{begin:"[+-]?(?:(?:[0-9](?:'?[0-9])*\\.(?:[0-9](?:'?[0-9])*)?|\\.[0-9](?:'?[0-9])*)(?:[Ee][+-]?[0-9]\
(?:'?[0-9])*)?|[0-9](?:'?[0-9])*[Ee][+-]?[0-9](?:'?[0-9])*|0[Xx](?:[0-9A-Fa-f](?:'?[0-9A-Fa-f])*(?:\\.(?:[0-9A-Fa-f](?:'?[0-9A-Fa-f])*)?)?|\\.[0-9A-Fa-f](?:'?[0-9\
A-Fa-f])*)[Pp][+-]?[0-9](?:'?[0-9])*)(?:[Ff](?:16|32|64|128)?|(BF|bf)16|[Ll]|)"},{begin:"[+-]?\\b(?:0[Bb][01](?:'?[01])*|0[Xx][0-9A-Fa-f](?:'?[0-9A-Fa-f])*|0(?:'\
?[0-7])*|[1-9](?:'?[0-9])*)(?:[Uu](?:LL?|ll?)|[Uu][Zz]?|(?:LL?|ll?)[Uu]?|[Zz][Uu]|)"}],relevance:0},m={className:"meta",begin:/#\s*[a-z]+\b/,end:/$/,keywords:{keyword:"\
if else elif endif define undef warning error line pragma _Pragma ifdef ifndef include"},contains:[{begin:/\\\n/,relevance:0},e.inherit(d,{className:"string"}),
{className:"string",begin:/<.*?>/},n,e.C_BLOCK_COMMENT_MODE]},h={className:"title",begin:t.optional(i)+e.IDENT_RE,relevance:0},f=t.optional(i)+e.IDENT_RE+"\\s*\\(",
_=["alignas","alignof","and","and_eq","asm","atomic_cancel","atomic_commit","atomic_noexcept","auto","bitand","bitor","break","case","catch","class","co_await",
"co_return","co_yield","compl","concept","const_cast|10","consteval","constexpr","constinit","continue","decltype","default","delete","do","dynamic_cast|10","el\
se","enum","explicit","export","extern","false","final","for","friend","goto","if","import","inline","module","mutable","namespace","new","noexcept","not","not_\
eq","nullptr","operator","or","or_eq","override","private","protected","public","reflexpr","register","reinterpret_cast|10","requires","return","sizeof","static\
_assert","static_cast|10","struct","switch","synchronized","template","this","thread_local","throw","transaction_safe","transaction_safe_dynamic","true","try","\
typedef","typeid","typename","union","using","virtual","volatile","while","xor","xor_eq"],C=["bool","char","char16_t","char32_t","char8_t","double","float","int",
"long","short","void","wchar_t","unsigned","signed","const","static"],T=["any","auto_ptr","barrier","binary_semaphore","bitset","complex","condition_variable","\
condition_variable_any","counting_semaphore","deque","false_type","flat_map","flat_set","future","imaginary","initializer_list","istringstream","jthread","latch",
"lock_guard","multimap","multiset","mutex","optional","ostringstream","packaged_task","pair","promise","priority_queue","queue","recursive_mutex","recursive_tim\
ed_mutex","scoped_lock","set","shared_future","shared_lock","shared_mutex","shared_timed_mutex","shared_ptr","stack","string_view","stringstream","timed_mutex",
"thread","true_type","tuple","unique_lock","unique_ptr","unordered_map","unordered_multimap","unordered_multiset","unordered_set","variant","vector","weak_ptr",
"wstring","wstring_view"],E=["abort","abs","acos","apply","as_const","asin","atan","atan2","calloc","ceil","cerr","cin","clog","cos","cosh","cout","declval","en\
dl","exchange","exit","exp","fabs","floor","fmod","forward","fprintf","fputs","free","frexp","fscanf","future","invoke","isalnum","isalpha","iscntrl","isdigit",
"isgraph","islower","isprint","ispunct","isspace","isupper","isxdigit","labs","launder","ldexp","log","log10","make_pair","make_shared","make_shared_for_overwri\
te","make_tuple","make_unique","malloc","memchr","memcmp","memcpy","memset","modf","move","pow","printf","putchar","puts","realloc","scanf","sin","sinh","snprin\
tf","sprintf","sqrt","sscanf","std","stderr","stdin","stdout","strcat","strchr","strcmp","strcpy","strcspn","strlen","strncat","strncmp","strncpy","strpbrk","st\
rrchr","strspn","strstr","swap","tan","tanh","terminate","to_underlying","tolower","toupper","vfprintf","visit","vprintf","vsprintf"],q={type:C,keyword:_,literal:[
"NULL","false","nullopt","nullptr","true"],built_in:["_Pragma"],_type_hints:T},z={className:"function.dispatch",relevance:0,keywords:{_hint:E},begin:t.concat(/\b/,
`(?!${_.join("|")})`,e.IDENT_RE,t.lookahead(/(<[^<>]+>|)\s*\(/))},A=[z,m,l,n,e.C_BLOCK_COMMENT_MODE,p,d],Z={variants:[{begin:/=/,end:/;/},{begin:/\(/,end:/\)/},
{beginKeywords:"new throw return else",end:/;/}],keywords:q,contains:A.concat([{begin:/\(/,end:/\)/,keywords:q,contains:A.concat(["self"]),relevance:0}]),relevance:0},
Y={className:"function",begin:"("+a+"[\\*&\\s]+)+"+f,returnBegin:!0,end:/[{;=]/,excludeEnd:!0,keywords:q,illegal:/[^\w\s\*&:<>.]/,contains:[{begin:r,keywords:q,
relevance:0},{begin:f,returnBegin:!0,contains:[h],relevance:0},{begin:/::/,relevance:0},{begin:/:/,endsWithParent:!0,contains:[d,p]},{relevance:0,match:/,/},{className:"\
params",begin:/\(/,end:/\)/,keywords:q,relevance:0,contains:[n,e.C_BLOCK_COMMENT_MODE,d,p,l,{begin:/\(/,end:/\)/,keywords:q,relevance:0,contains:["self",n,e.C_BLOCK_COMMENT_MODE,
d,p,l]}]},l,n,e.C_BLOCK_COMMENT_MODE,m]};return{name:"C++",aliases:["cc","c++","h++","hpp","hh","hxx","cxx"],keywords:q,illegal:"</",classNameAliases:{"function\
.dispatch":"built_in"},contains:[].concat(Z,Y,z,A,[m,{begin:"\\b(deque|list|queue|priority_queue|pair|stack|vector|map|set|bitset|multiset|multimap|unordered_map\
|unordered_set|unordered_multiset|unordered_multimap|array|tuple|optional|variant|function|flat_map|flat_set)\\s*<(?!<)",end:">",keywords:q,contains:["self",l]},
{begin:e.IDENT_RE+"::",keywords:q},{match:[/\b(?:enum(?:\s+(?:class|struct))?|class|struct|union)/,/\s+/,/\w+/],className:{1:"keyword",3:"title.class"}}])}}function Gi(e){let t=["bool","byte","char","decimal","delegate","double","dynamic","enum","float","int","long","nint","nuint","object","sbyte","short","string",
"ulong","uint","ushort"],n=["public","private","protected","static","internal","protected","abstract","async","extern","override","unsafe","virtual","new","seal\
ed","partial"],r=["default","false","null","true"],i=["abstract","as","base","break","case","catch","class","const","continue","do","else","event","explicit","e\
xtern","finally","fixed","for","foreach","goto","if","implicit","in","interface","internal","is","lock","namespace","new","operator","out","override","params","\
private","protected","public","readonly","record","ref","return","scoped","sealed","sizeof","stackalloc","static","struct","switch","this","throw","try","typeof",
"unchecked","unsafe","using","virtual","void","volatile","while"],o=["add","alias","and","ascending","args","async","await","by","descending","dynamic","equals",
"file","from","get","global","group","init","into","join","let","nameof","not","notnull","on","or","orderby","partial","record","remove","required","scoped","se\
lect","set","unmanaged","value|0","var","when","where","with","yield"],a={keyword:i.concat(o),built_in:t,literal:r},l=e.inherit(e.TITLE_MODE,{begin:"[a-zA-Z](\\.\
?\\w)*"}),u={className:"number",variants:[{begin:"\\b(0b[01']+)"},{begin:"(-?)\\b([\\d']+(\\.[\\d']*)?|\\.[\\d']+)(u|U|l|L|ul|UL|f|F|b|B)"},{begin:"(-?)(\\b0[xX]\
[a-fA-F0-9'_]+|(\\b[\\d'_]+(\\.[\\d'_]*)?|\\.[\\d'_]+)([eE][-+]?[\\d'_]+)?)"}],relevance:0},d={className:"string",begin:/"""("*)(?!")(.|\n)*?"""\1/,relevance:1},
p={className:"string",begin:'@"',end:'"',contains:[{begin:'""'}]},m=e.inherit(p,{illegal:/\n/}),h={className:"subst",begin:/\{/,end:/\}/,keywords:a},f=e.inherit(
h,{illegal:/\n/}),_={className:"string",begin:/\$"/,end:'"',illegal:/\n/,contains:[{begin:/\{\{/},{begin:/\}\}/},e.BACKSLASH_ESCAPE,f]},C={className:"string",begin:/\$@"/,
end:'"',contains:[{begin:/\{\{/},{begin:/\}\}/},{begin:'""'},h]},T=e.inherit(C,{illegal:/\n/,contains:[{begin:/\{\{/},{begin:/\}\}/},{begin:'""'},f]});h.contains=
[C,_,p,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,u,e.C_BLOCK_COMMENT_MODE],f.contains=[T,_,m,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,u,e.inherit(e.C_BLOCK_COMMENT_MODE,
{illegal:/\n/})];let E={variants:[d,C,_,p,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE]},v={begin:"<",end:">",contains:[{beginKeywords:"in out"},l]},D=e.IDENT_RE+"(<"+
e.IDENT_RE+"(\\s*,\\s*"+e.IDENT_RE+")*>)?(\\[\\])?",q={begin:"@"+e.IDENT_RE,relevance:0};return{name:"C#",aliases:["cs","c#"],keywords:a,illegal:/::/,contains:[
e.COMMENT("///","$",{returnBegin:!0,contains:[{className:"doctag",variants:[{begin:"///",relevance:0},{begin:"<!--|-->"},{begin:"</?",end:">"}]}]}),e.C_LINE_COMMENT_MODE,
e.C_BLOCK_COMMENT_MODE,{className:"meta",begin:"#",end:"$",keywords:{keyword:"if else elif endif define undef warning error line region endregion pragma checksu\
m"}},E,u,{beginKeywords:"class interface",relevance:0,end:/[{;=]/,illegal:/[^\s:,]/,contains:[{beginKeywords:"where class"},l,v,e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},
{beginKeywords:"namespace",relevance:0,end:/[{;=]/,illegal:/[^\s:]/,contains:[l,e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},{beginKeywords:"record",relevance:0,
end:/[{;=]/,illegal:/[^\s:]/,contains:[l,v,e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},{className:"meta",begin:"^\\s*\\[(?=[\\w])",excludeBegin:!0,end:"\\]",
excludeEnd:!0,contains:[{className:"string",begin:/"/,end:/"/}]},{beginKeywords:"new return throw await else",relevance:0},{className:"function",begin:"("+D+"\\s\
+)+"+e.IDENT_RE+"\\s*(<[^=]+>\\s*)?\\(",returnBegin:!0,end:/\s*[{;=]/,excludeEnd:!0,keywords:a,contains:[{beginKeywords:n.join(" "),relevance:0},{begin:e.IDENT_RE+
"\\s*(<[^=]+>\\s*)?\\(",returnBegin:!0,contains:[e.TITLE_MODE,v],relevance:0},{match:/\(\)/},{className:"params",begin:/\(/,end:/\)/,excludeBegin:!0,excludeEnd:!0,
keywords:a,relevance:0,contains:[E,u,e.C_BLOCK_COMMENT_MODE]},e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},q]}}var Ll=e=>({IMPORTANT:{scope:"meta",begin:"!important"},BLOCK_COMMENT:e.C_BLOCK_COMMENT_MODE,HEXCOLOR:{scope:"number",begin:/#(([0-9a-fA-F]{3,4})|(([0-9a-fA-F]{2}){3,4}))\b/},
UNICODE_RANGE:{scope:"number",begin:/\b[Uu]\+[0-9A-Fa-f][0-9A-Fa-f?]{0,4}(-[0-9A-Fa-f][0-9A-Fa-f]{0,4})?/},FUNCTION_DISPATCH:{className:"built_in",begin:/[\w-]+(?=\()/},
ATTRIBUTE_SELECTOR_MODE:{scope:"selector-attr",begin:/\[/,end:/\]/,illegal:"$",contains:[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE]},CSS_NUMBER_MODE:{scope:"number",
begin:e.NUMBER_RE+"(%|em|ex|ch|rem|vw|vh|vmin|vmax|cm|mm|in|pt|pc|px|deg|grad|rad|turn|s|ms|Hz|kHz|dpi|dpcm|dppx)?",relevance:0},CSS_VARIABLE:{className:"attr",
begin:/--[A-Za-z_][A-Za-z0-9_-]*/}}),Bl=["a","abbr","address","article","aside","audio","b","blockquote","body","button","canvas","caption","cite","code","dd","\
del","details","dfn","div","dl","dt","em","fieldset","figcaption","figure","footer","form","h1","h2","h3","h4","h5","h6","header","hgroup","html","i","iframe","\
img","input","ins","kbd","label","legend","li","main","mark","menu","nav","object","ol","optgroup","option","p","picture","q","quote","samp","section","select",
"source","span","strong","summary","sup","table","tbody","td","textarea","tfoot","th","thead","time","tr","ul","var","video"],ql=["defs","g","marker","mask","pa\
ttern","svg","switch","symbol","feBlend","feColorMatrix","feComponentTransfer","feComposite","feConvolveMatrix","feDiffuseLighting","feDisplacementMap","feFlood",
"feGaussianBlur","feImage","feMerge","feMorphology","feOffset","feSpecularLighting","feTile","feTurbulence","linearGradient","radialGradient","stop","circle","e\
llipse","image","line","path","polygon","polyline","rect","text","use","textPath","tspan","foreignObject","clipPath"],Fl=[...Bl,...ql],Pl=["any-hover","any-poin\
ter","aspect-ratio","color","color-gamut","color-index","device-aspect-ratio","device-height","device-width","display-mode","forced-colors","grid","height","hov\
er","inverted-colors","monochrome","orientation","overflow-block","overflow-inline","pointer","prefers-color-scheme","prefers-contrast","prefers-reduced-motion",
"prefers-reduced-transparency","resolution","scan","scripting","update","width","min-width","max-width","min-height","max-height"].sort().reverse(),zl=["active",
"any-link","blank","checked","current","default","defined","dir","disabled","drop","empty","enabled","first","first-child","first-of-type","fullscreen","future",
"focus","focus-visible","focus-within","has","host","host-context","hover","indeterminate","in-range","invalid","is","lang","last-child","last-of-type","left","\
link","local-link","not","nth-child","nth-col","nth-last-child","nth-last-col","nth-last-of-type","nth-of-type","only-child","only-of-type","optional","out-of-r\
ange","past","placeholder-shown","read-only","read-write","required","right","root","scope","target","target-within","user-invalid","valid","visited","where"].sort().
reverse(),Ul=["after","backdrop","before","cue","cue-region","first-letter","first-line","grammar-error","marker","part","placeholder","selection","slotted","sp\
elling-error"].sort().reverse(),$l=["accent-color","align-content","align-items","align-self","alignment-baseline","all","anchor-name","animation","animation-co\
mposition","animation-delay","animation-direction","animation-duration","animation-fill-mode","animation-iteration-count","animation-name","animation-play-state",
"animation-range","animation-range-end","animation-range-start","animation-timeline","animation-timing-function","appearance","aspect-ratio","backdrop-filter","\
backface-visibility","background","background-attachment","background-blend-mode","background-clip","background-color","background-image","background-origin","b\
ackground-position","background-position-x","background-position-y","background-repeat","background-size","baseline-shift","block-size","border","border-block",
"border-block-color","border-block-end","border-block-end-color","border-block-end-style","border-block-end-width","border-block-start","border-block-start-colo\
r","border-block-start-style","border-block-start-width","border-block-style","border-block-width","border-bottom","border-bottom-color","border-bottom-left-rad\
ius","border-bottom-right-radius","border-bottom-style","border-bottom-width","border-collapse","border-color","border-end-end-radius","border-end-start-radius",
"border-image","border-image-outset","border-image-repeat","border-image-slice","border-image-source","border-image-width","border-inline","border-inline-color",
"border-inline-end","border-inline-end-color","border-inline-end-style","border-inline-end-width","border-inline-start","border-inline-start-color","border-inli\
ne-start-style","border-inline-start-width","border-inline-style","border-inline-width","border-left","border-left-color","border-left-style","border-left-width",
"border-radius","border-right","border-right-color","border-right-style","border-right-width","border-spacing","border-start-end-radius","border-start-start-rad\
ius","border-style","border-top","border-top-color","border-top-left-radius","border-top-right-radius","border-top-style","border-top-width","border-width","bot\
tom","box-align","box-decoration-break","box-direction","box-flex","box-flex-group","box-lines","box-ordinal-group","box-orient","box-pack","box-shadow","box-si\
zing","break-after","break-before","break-inside","caption-side","caret-color","clear","clip","clip-path","clip-rule","color","color-interpolation","color-inter\
polation-filters","color-profile","color-rendering","color-scheme","column-count","column-fill","column-gap","column-rule","column-rule-color","column-rule-styl\
e","column-rule-width","column-span","column-width","columns","contain","contain-intrinsic-block-size","contain-intrinsic-height","contain-intrinsic-inline-size",
"contain-intrinsic-size","contain-intrinsic-width","container","container-name","container-type","content","content-visibility","counter-increment","counter-res\
et","counter-set","cue","cue-after","cue-before","cursor","cx","cy","direction","display","dominant-baseline","empty-cells","enable-background","field-sizing","\
fill","fill-opacity","fill-rule","filter","flex","flex-basis","flex-direction","flex-flow","flex-grow","flex-shrink","flex-wrap","float","flood-color","flood-op\
acity","flow","font","font-display","font-family","font-feature-settings","font-kerning","font-language-override","font-optical-sizing","font-palette","font-siz\
e","font-size-adjust","font-smooth","font-smoothing","font-stretch","font-style","font-synthesis","font-synthesis-position","font-synthesis-small-caps","font-sy\
nthesis-style","font-synthesis-weight","font-variant","font-variant-alternates","font-variant-caps","font-variant-east-asian","font-variant-emoji","font-variant\
-ligatures","font-variant-numeric","font-variant-position","font-variation-settings","font-weight","forced-color-adjust","gap","glyph-orientation-horizontal","g\
lyph-orientation-vertical","grid","grid-area","grid-auto-columns","grid-auto-flow","grid-auto-rows","grid-column","grid-column-end","grid-column-start","grid-ga\
p","grid-row","grid-row-end","grid-row-start","grid-template","grid-template-areas","grid-template-columns","grid-template-rows","hanging-punctuation","height",
"hyphenate-character","hyphenate-limit-chars","hyphens","icon","image-orientation","image-rendering","image-resolution","ime-mode","initial-letter","initial-let\
ter-align","inline-size","inset","inset-area","inset-block","inset-block-end","inset-block-start","inset-inline","inset-inline-end","inset-inline-start","isolat\
ion","justify-content","justify-items","justify-self","kerning","left","letter-spacing","lighting-color","line-break","line-height","line-height-step","list-sty\
le","list-style-image","list-style-position","list-style-type","margin","margin-block","margin-block-end","margin-block-start","margin-bottom","margin-inline","\
margin-inline-end","margin-inline-start","margin-left","margin-right","margin-top","margin-trim","marker","marker-end","marker-mid","marker-start","marks","mask",
"mask-border","mask-border-mode","mask-border-outset","mask-border-repeat","mask-border-slice","mask-border-source","mask-border-width","mask-clip","mask-compos\
ite","mask-image","mask-mode","mask-origin","mask-position","mask-repeat","mask-size","mask-type","masonry-auto-flow","math-depth","math-shift","math-style","ma\
x-block-size","max-height","max-inline-size","max-width","min-block-size","min-height","min-inline-size","min-width","mix-blend-mode","nav-down","nav-index","na\
v-left","nav-right","nav-up","none","normal","object-fit","object-position","offset","offset-anchor","offset-distance","offset-path","offset-position","offset-r\
otate","opacity","order","orphans","outline","outline-color","outline-offset","outline-style","outline-width","overflow","overflow-anchor","overflow-block","ove\
rflow-clip-margin","overflow-inline","overflow-wrap","overflow-x","overflow-y","overlay","overscroll-behavior","overscroll-behavior-block","overscroll-behavior-\
inline","overscroll-behavior-x","overscroll-behavior-y","padding","padding-block","padding-block-end","padding-block-start","padding-bottom","padding-inline","p\
adding-inline-end","padding-inline-start","padding-left","padding-right","padding-top","page","page-break-after","page-break-before","page-break-inside","paint-\
order","pause","pause-after","pause-before","perspective","perspective-origin","place-content","place-items","place-self","pointer-events","position","position-\
anchor","position-visibility","print-color-adjust","quotes","r","resize","rest","rest-after","rest-before","right","rotate","row-gap","ruby-align","ruby-positio\
n","scale","scroll-behavior","scroll-margin","scroll-margin-block","scroll-margin-block-end","scroll-margin-block-start","scroll-margin-bottom","scroll-margin-i\
nline","scroll-margin-inline-end","scroll-margin-inline-start","scroll-margin-left","scroll-margin-right","scroll-margin-top","scroll-padding","scroll-padding-b\
lock","scroll-padding-block-end","scroll-padding-block-start","scroll-padding-bottom","scroll-padding-inline","scroll-padding-inline-end","scroll-padding-inline\
-start","scroll-padding-left","scroll-padding-right","scroll-padding-top","scroll-snap-align","scroll-snap-stop","scroll-snap-type","scroll-timeline","scroll-ti\
meline-axis","scroll-timeline-name","scrollbar-color","scrollbar-gutter","scrollbar-width","shape-image-threshold","shape-margin","shape-outside","shape-renderi\
ng","speak","speak-as","src","stop-color","stop-opacity","stroke","stroke-dasharray","stroke-dashoffset","stroke-linecap","stroke-linejoin","stroke-miterlimit",
"stroke-opacity","stroke-width","tab-size","table-layout","text-align","text-align-all","text-align-last","text-anchor","text-combine-upright","text-decoration",
"text-decoration-color","text-decoration-line","text-decoration-skip","text-decoration-skip-ink","text-decoration-style","text-decoration-thickness","text-empha\
sis","text-emphasis-color","text-emphasis-position","text-emphasis-style","text-indent","text-justify","text-orientation","text-overflow","text-rendering","text\
-shadow","text-size-adjust","text-transform","text-underline-offset","text-underline-position","text-wrap","text-wrap-mode","text-wrap-style","timeline-scope","\
top","touch-action","transform","transform-box","transform-origin","transform-style","transition","transition-behavior","transition-delay","transition-duration",
"transition-property","transition-timing-function","translate","unicode-bidi","unicode-range","user-modify","user-select","vector-effect","vertical-align","view\
-timeline","view-timeline-axis","view-timeline-inset","view-timeline-name","view-transition-name","visibility","voice-balance","voice-duration","voice-family","\
voice-pitch","voice-range","voice-rate","voice-stress","voice-volume","white-space","white-space-collapse","widows","width","will-change","word-break","word-spa\
cing","word-wrap","writing-mode","x","y","z-index","zoom"].sort().reverse();function Hi(e){let t=e.regex,n=Ll(e),r={begin:/-(webkit|moz|ms|o)-(?=[a-z])/},i="and\
 or not only",o=/@-?\w[\w]*(-\w+)*/,a="[a-zA-Z-][a-zA-Z0-9_-]*",l=[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE];return{name:"CSS",case_insensitive:!0,illegal:/[=|'\$]/,
keywords:{keyframePosition:"from to"},classNameAliases:{keyframePosition:"selector-tag"},contains:[n.BLOCK_COMMENT,r,n.CSS_NUMBER_MODE,{className:"selector-id",
begin:/#[A-Za-z0-9_-]+/,relevance:0},{className:"selector-class",begin:"\\."+a,relevance:0},n.ATTRIBUTE_SELECTOR_MODE,{className:"selector-pseudo",variants:[{begin:"\
:("+zl.join("|")+")"},{begin:":(:)?("+Ul.join("|")+")"}]},n.CSS_VARIABLE,{className:"attribute",begin:"\\b("+$l.join("|")+")\\b"},{begin:/:/,end:/[;}{]/,contains:[
n.BLOCK_COMMENT,n.HEXCOLOR,n.IMPORTANT,n.CSS_NUMBER_MODE,n.UNICODE_RANGE,...l,{begin:/(url|data-uri)\(/,end:/\)/,relevance:0,keywords:{built_in:"url data-uri"},
contains:[...l,{className:"string",begin:/[^)]/,endsWithParent:!0,excludeEnd:!0}]},n.FUNCTION_DISPATCH]},{begin:t.lookahead(/@/),end:"[{;]",relevance:0,illegal:/:/,
contains:[{className:"keyword",begin:o},{begin:/\s/,endsWithParent:!0,excludeEnd:!0,relevance:0,keywords:{$pattern:/[a-z-]+/,keyword:i,attribute:Pl.join(" ")},contains:[
{begin:/[a-z-]+(?=:)/,className:"attribute"},...l,n.CSS_NUMBER_MODE]}]},{className:"selector-tag",begin:"\\b("+Fl.join("|")+")\\b"}]}}function Ki(e){let t=e.regex;return{name:"Diff",aliases:["patch"],contains:[{className:"meta",relevance:10,match:t.either(/^@@ +-\d+,\d+ +\+\d+,\d+ +@@/,/^@@ +-\d+ +\+\d+,\d+ +@@/,
/^@@ +-\d+,\d+ +\+\d+ +@@/,/^@@ +-\d+ +\+\d+ +@@/,/^\*\*\* +\d+,\d+ +\*\*\*\*$/,/^--- +\d+,\d+ +----$/)},{className:"comment",variants:[{begin:t.either(/Index: /,
/^index/,/={3,}/,/^-{3}/,/^\*{3} /,/^\+{3}/,/^diff --git/),end:/$/},{match:/^\*{15}$/}]},{className:"addition",begin:/^\+/,end:/$/},{className:"deletion",begin:/^-/,
end:/$/},{className:"addition",begin:/^!/,end:/$/}]}}function Wi(e){let o={keyword:["break","case","chan","const","continue","default","defer","else","fallthrough","for","func","go","goto","if","import","interface",
"map","package","range","return","select","struct","switch","type","var"],type:["bool","byte","complex64","complex128","error","float32","float64","int8","int16",
"int32","int64","string","uint8","uint16","uint32","uint64","int","uint","uintptr","rune"],literal:["true","false","iota","nil"],built_in:["append","cap","close",
"complex","copy","imag","len","make","new","panic","print","println","real","recover","delete"]};return{name:"Go",aliases:["golang"],keywords:o,illegal:"</",contains:[
e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,{className:"string",variants:[e.QUOTE_STRING_MODE,e.APOS_STRING_MODE,{begin:"`",end:"`"}]},{className:"number",variants:[
{match:/-?\b0[xX]\.[a-fA-F0-9](_?[a-fA-F0-9])*[pP][+-]?\d(_?\d)*i?/,relevance:0},{match:/-?\b0[xX](_?[a-fA-F0-9])+((\.([a-fA-F0-9](_?[a-fA-F0-9])*)?)?[pP][+-]?\d(_?\d)*)?i?/,
relevance:0},{match:/-?\b0[oO](_?[0-7])*i?/,relevance:0},{match:/-?\.\d(_?\d)*([eE][+-]?\d(_?\d)*)?i?/,relevance:0},{match:/-?\b\d(_?\d)*(\.(\d(_?\d)*)?)?([eE][+-]?\d(_?\d)*)?i?/,
relevance:0}]},{begin:/:=/},{className:"function",beginKeywords:"func",end:"\\s*(\\{|$)",excludeEnd:!0,contains:[e.TITLE_MODE,{className:"params",begin:/\(/,end:/\)/,
endsParent:!0,keywords:o,illegal:/["']/}]}]}}function Vi(e){let t=e.regex,n=/[_A-Za-z][_0-9A-Za-z]*/;return{name:"GraphQL",aliases:["gql"],case_insensitive:!0,disableAutodetect:!1,keywords:{keyword:["query",
"mutation","subscription","type","input","schema","directive","interface","union","scalar","fragment","enum","on"],literal:["true","false","null"]},contains:[e.
HASH_COMMENT_MODE,e.QUOTE_STRING_MODE,e.NUMBER_MODE,{scope:"punctuation",match:/[.]{3}/,relevance:0},{scope:"punctuation",begin:/[\!\(\)\:\=\[\]\{\|\}]{1}/,relevance:0},
{scope:"variable",begin:/\$/,end:/\W/,excludeEnd:!0,relevance:0},{scope:"meta",match:/@\w+/,excludeEnd:!0},{scope:"symbol",begin:t.concat(n,t.lookahead(/\s*:/)),
relevance:0}],illegal:[/[;<']/,/BEGIN/]}}function Zi(e){let t=e.regex,n={className:"number",relevance:0,variants:[{begin:/([+-]+)?[\d]+_[\d_]+/},{begin:e.NUMBER_RE}]},r=e.COMMENT();r.variants=[{begin:/;/,
end:/$/},{begin:/#/,end:/$/}];let i={className:"variable",variants:[{begin:/\$[\w\d"][\w\d_]*/},{begin:/\$\{(.*?)\}/}]},o={className:"literal",begin:/\bon|off|true|false|yes|no\b/},
a={className:"string",contains:[e.BACKSLASH_ESCAPE],variants:[{begin:"'''",end:"'''",relevance:10},{begin:'"""',end:'"""',relevance:10},{begin:'"',end:'"'},{begin:"\
'",end:"'"}]},l={begin:/\[/,end:/\]/,contains:[r,o,i,a,n,"self"],relevance:0},u=/[A-Za-z0-9_-]+/,d=/"(\\"|[^"])*"/,p=/'[^']*'/,m=t.either(u,d,p),h=t.concat(m,"(\
\\s*\\.\\s*",m,")*",t.lookahead(/\s*=\s*[^#\s]/));return{name:"TOML, also INI",aliases:["toml"],case_insensitive:!0,illegal:/\S/,contains:[r,{className:"section",
begin:/\[+/,end:/\]+/},{begin:h,className:"attr",starts:{end:/$/,contains:[r,l,o,i,a,n]}}]}}var Bt="[0-9](_*[0-9])*",_n=`\\.(${Bt})`,En="[0-9a-fA-F](_*[0-9a-fA-F])*",Yi={className:"number",variants:[{begin:`(\\b(${Bt})((${_n})|\\.)?|(${_n}))[eE][+-]?(${Bt}\
)[fFdD]?\\b`},{begin:`\\b(${Bt})((${_n})[fFdD]?\\b|\\.([fFdD]\\b)?)`},{begin:`(${_n})[fFdD]?\\b`},{begin:`\\b(${Bt})[fFdD]\\b`},{begin:`\\b0[xX]((${En})\\.?|(${En}\
)?\\.(${En}))[pP][+-]?(${Bt})[fFdD]?\\b`},{begin:"\\b(0|[1-9](_*[0-9])*)[lL]?\\b"},{begin:`\\b0[xX](${En})[lL]?\\b`},{begin:"\\b0(_*[0-7])*[lL]?\\b"},{begin:"\\b\
0[bB][01](_*[01])*[lL]?\\b"}],relevance:0};function Xi(e,t,n){return n===-1?"":e.replace(t,r=>Xi(e,t,n-1))}function Qi(e){let t=e.regex,n="[\xC0-\u02B8a-zA-Z_$][\xC0-\u02B8a-zA\
-Z_$0-9]*",r=n+Xi("(?:<"+n+"~~~(?:\\s*,\\s*"+n+"~~~)*>)?",/~~~/g,2),u={keyword:["synchronized","abstract","private","var","static","if","const ","for","while","\
strictfp","finally","protected","import","native","final","void","enum","else","break","transient","catch","instanceof","volatile","case","assert","package","de\
fault","public","try","switch","continue","throws","protected","public","private","module","requires","exports","do","sealed","yield","permits","goto","when"],literal:[
"false","true","null"],type:["char","boolean","long","float","int","byte","short","double"],built_in:["super","this"]},d={className:"meta",begin:"@"+n,contains:[
{begin:/\(/,end:/\)/,contains:["self"]}]},p={className:"params",begin:/\(/,end:/\)/,keywords:u,relevance:0,contains:[e.C_BLOCK_COMMENT_MODE],endsParent:!0};return{
name:"Java",aliases:["jsp"],keywords:u,illegal:/<\/|#/,contains:[e.COMMENT("/\\*\\*","\\*/",{relevance:0,contains:[{begin:/\w+@/,relevance:0},{className:"doctag",
begin:"@[A-Za-z]+"}]}),{begin:/import java\.[a-z]+\./,keywords:"import",relevance:2},e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,{begin:/"""/,end:/"""/,className:"\
string",contains:[e.BACKSLASH_ESCAPE]},e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,{match:[/\b(?:class|interface|enum|extends|implements|new)/,/\s+/,n],className:{1:"\
keyword",3:"title.class"}},{match:/non-sealed/,scope:"keyword"},{begin:[t.concat(/(?!else)/,n),/\s+/,n,/\s+/,/=(?!=)/],className:{1:"type",3:"variable",5:"opera\
tor"}},{begin:[/record/,/\s+/,n],className:{1:"keyword",3:"title.class"},contains:[p,e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},{beginKeywords:"new throw re\
turn else",relevance:0},{begin:["(?:"+r+"\\s+)",e.UNDERSCORE_IDENT_RE,/\s*(?=\()/],className:{2:"title.function"},keywords:u,contains:[{className:"params",begin:/\(/,
end:/\)/,keywords:u,relevance:0,contains:[d,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,Yi,e.C_BLOCK_COMMENT_MODE]},e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},Yi,
d]}}var ji="[A-Za-z$_][0-9A-Za-z$_]*",Gl=["as","in","of","if","for","while","finally","var","new","function","do","return","void","else","break","catch","instanceof",
"with","throw","case","default","try","switch","continue","typeof","delete","let","yield","const","class","debugger","async","await","static","import","from","e\
xport","extends","using"],Hl=["true","false","null","undefined","NaN","Infinity"],Ji=["Object","Function","Boolean","Symbol","Math","Date","Number","BigInt","St\
ring","RegExp","Array","Float32Array","Float64Array","Int8Array","Uint8Array","Uint8ClampedArray","Int16Array","Int32Array","Uint16Array","Uint32Array","BigInt6\
4Array","BigUint64Array","Set","Map","WeakSet","WeakMap","ArrayBuffer","SharedArrayBuffer","Atomics","DataView","JSON","Promise","Generator","GeneratorFunction",
"AsyncFunction","Reflect","Proxy","Intl","WebAssembly"],ea=["Error","EvalError","InternalError","RangeError","ReferenceError","SyntaxError","TypeError","URIErro\
r"],ta=["setInterval","setTimeout","clearInterval","clearTimeout","require","exports","eval","isFinite","isNaN","parseFloat","parseInt","decodeURI","decodeURICo\
mponent","encodeURI","encodeURIComponent","escape","unescape"],Kl=["arguments","this","super","console","window","document","localStorage","sessionStorage","mod\
ule","global"],Wl=[].concat(ta,Ji,ea);function na(e){let t=e.regex,n=(G,{after:ne})=>{let y="</"+G[0].slice(1);return G.input.indexOf(y,ne)!==-1},r=ji,i={begin:"\
<>",end:"</>"},o=/<[A-Za-z0-9\\._:-]+\s*\/>/,a={begin:/<[A-Za-z0-9\\._:-]+/,end:/\/[A-Za-z0-9\\._:-]+>|\/>/,isTrulyOpeningTag:(G,ne)=>{let y=G[0].length+G.index,
le=G.input[y];if(le==="<"||le===","){ne.ignoreMatch();return}le===">"&&(n(G,{after:y})||ne.ignoreMatch());let de,w=G.input.substring(y);if(de=w.match(/^\s*=/)){
ne.ignoreMatch();return}if((de=w.match(/^\s+extends\s+/))&&de.index===0){ne.ignoreMatch();return}}},l={$pattern:ji,keyword:Gl,literal:Hl,built_in:Wl,"variable.l\
anguage":Kl},u="[0-9](_?[0-9])*",d=`\\.(${u})`,p="0|[1-9](_?[0-9])*|0[0-7]*[89][0-9]*",m={className:"number",variants:[{begin:`(\\b(${p})((${d})|\\.)?|(${d}))[e\
E][+-]?(${u})\\b`},{begin:`\\b(${p})\\b((${d})\\b|\\.)?|(${d})\\b`},{begin:"\\b(0|[1-9](_?[0-9])*)n\\b"},{begin:"\\b0[xX][0-9a-fA-F](_?[0-9a-fA-F])*n?\\b"},{begin:"\
\\b0[bB][0-1](_?[0-1])*n?\\b"},{begin:"\\b0[oO][0-7](_?[0-7])*n?\\b"},{begin:"\\b0[0-7]+n?\\b"}],relevance:0},h={className:"subst",begin:"\\$\\{",end:"\\}",keywords:l,
contains:[]},f={begin:".?html`",end:"",starts:{end:"`",returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"xml"}},_={begin:".?css`",end:"",starts:{end:"`",
returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"css"}},C={begin:".?gql`",end:"",starts:{end:"`",returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"\
graphql"}},T={className:"string",begin:"`",end:"`",contains:[e.BACKSLASH_ESCAPE,h]},v={className:"comment",variants:[e.COMMENT(/\/\*\*(?!\/)/,"\\*/",{relevance:0,
contains:[{begin:"(?=@[A-Za-z]+)",relevance:0,contains:[{className:"doctag",begin:"@[A-Za-z]+"},{className:"type",begin:"\\{",end:"\\}",excludeEnd:!0,excludeBegin:!0,
relevance:0},{className:"variable",begin:r+"(?=\\s*(-)|$)",endsParent:!0,relevance:0},{begin:/(?=[^\n])\s/,relevance:0}]}]}),e.C_BLOCK_COMMENT_MODE,e.C_LINE_COMMENT_MODE]},
D=[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,f,_,C,T,{match:/\$\d+/},m];h.contains=D.concat({begin:/\{/,end:/\}/,keywords:l,contains:["self"].concat(D)});let q=[].
concat(v,h.contains),z=q.concat([{begin:/(\s*)\(/,end:/\)/,keywords:l,contains:["self"].concat(q)}]),A={className:"params",begin:/(\s*)\(/,end:/\)/,excludeBegin:!0,
excludeEnd:!0,keywords:l,contains:z},Z={variants:[{match:[/class/,/\s+/,r,/\s+/,/extends/,/\s+/,t.concat(r,"(",t.concat(/\./,r),")*")],scope:{1:"keyword",3:"tit\
le.class",5:"keyword",7:"title.class.inherited"}},{match:[/class/,/\s+/,r],scope:{1:"keyword",3:"title.class"}}]},Y={relevance:0,match:t.either(/\bJSON/,/\b[A-Z][a-z]+([A-Z][a-z]*|\d)*/,
/\b[A-Z]{2,}([A-Z][a-z]+|\d)+([A-Z][a-z]*)*/,/\b[A-Z]{2,}[a-z]+([A-Z][a-z]+|\d)*([A-Z][a-z]*)*/),className:"title.class",keywords:{_:[...Ji,...ea]}},X={label:"u\
se_strict",className:"meta",relevance:10,begin:/^\s*['"]use (strict|asm)['"]/},O={variants:[{match:[/function/,/\s+/,r,/(?=\s*\()/]},{match:[/function/,/\s*(?=\()/]}],
className:{1:"keyword",3:"title.function"},label:"func.def",contains:[A],illegal:/%/},oe={relevance:0,match:/\b[A-Z][A-Z_0-9]+\b/,className:"variable.constant"};
function ie(G){return t.concat("(?!",G.join("|"),")")}let W={match:t.concat(/\b/,ie([...ta,"super","import","await"].map(G=>`${G}\\s*\\(`)),r,t.lookahead(/\s*\(/)),
className:"title.function",relevance:0},j={begin:t.concat(/\./,t.lookahead(t.concat(r,/(?![0-9A-Za-z$_(])/))),end:r,excludeBegin:!0,keywords:"prototype",className:"\
property",relevance:0},Q={match:[/get|set/,/\s+/,r,/(?=\()/],className:{1:"keyword",3:"title.function"},contains:[{begin:/\(\)/},A]},R="(\\([^()]*(\\([^()]*(\\([^(\
)]*\\)[^()]*)*\\)[^()]*)*\\)|"+e.UNDERSCORE_IDENT_RE+")\\s*=>",P={match:[/const|var|let/,/\s+/,r,/\s*/,/=\s*/,/(async\s*)?/,t.lookahead(R)],keywords:"async",className:{
1:"keyword",3:"title.function"},contains:[A]};return{name:"JavaScript",aliases:["js","jsx","mjs","cjs"],keywords:l,exports:{PARAMS_CONTAINS:z,CLASS_REFERENCE:Y},
illegal:/#(?![$_A-Za-z])/,contains:[e.SHEBANG({label:"shebang",binary:"node",relevance:5}),X,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,f,_,C,T,v,{match:/\$\d+/},m,
Y,{scope:"attr",match:r+t.lookahead(":"),relevance:0},P,{begin:"("+e.RE_STARTERS_RE+"|\\b(case|return|throw)\\b)\\s*",keywords:"return throw case",relevance:0,contains:[
v,e.REGEXP_MODE,{className:"function",begin:R,returnBegin:!0,end:"\\s*=>",contains:[{className:"params",variants:[{begin:e.UNDERSCORE_IDENT_RE,relevance:0},{className:null,
begin:/\(\s*\)/,skip:!0},{begin:/(\s*)\(/,end:/\)/,excludeBegin:!0,excludeEnd:!0,keywords:l,contains:z}]}]},{begin:/,/,relevance:0},{match:/\s+/,relevance:0},{variants:[
{begin:i.begin,end:i.end},{match:o},{begin:a.begin,"on:begin":a.isTrulyOpeningTag,end:a.end}],subLanguage:"xml",contains:[{begin:a.begin,end:a.end,skip:!0,contains:[
"self"]}]}]},O,{beginKeywords:"while if switch catch for"},{begin:"\\b(?!function)"+e.UNDERSCORE_IDENT_RE+"\\([^()]*(\\([^()]*(\\([^()]*\\)[^()]*)*\\)[^()]*)*\\)\\s*\\{",
returnBegin:!0,label:"func.def",contains:[A,e.inherit(e.TITLE_MODE,{begin:r,className:"title.function"})]},{match:/\.\.\./,relevance:0},j,{match:"\\$"+r,relevance:0},
{match:[/\bconstructor(?=\s*\()/],className:{1:"title.function"},contains:[A]},W,oe,Z,Q,{match:/\$[(.]/}]}}var Vl="([-+]?)(\\b0[xX][a-fA-F0-9]+|(\\b\\d+(\\.\\d*)?|\\.\\d+)([eE][-+]?\\d+)?)|NaN|[-+]?Infinity",Zl={scope:"number",match:Vl,relevance:0};function ra(e){let t={
className:"attr",begin:/(("(\\.|[^\\"\r\n])*")|('(\\.|[^\\'\r\n])*'))(?=\s*:)/,relevance:1.01},n={match:/[{}[\],:]/,className:"punctuation",relevance:0},r=["tru\
e","false","null"],i={scope:"literal",beginKeywords:r.join(" ")};return{name:"JSON",aliases:["jsonc","json5"],keywords:{literal:r},contains:[t,n,e.APOS_STRING_MODE,
e.QUOTE_STRING_MODE,i,Zl,e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE],illegal:"\\S"}}var qt="[0-9](_*[0-9])*",kn=`\\.(${qt})`,Sn="[0-9a-fA-F](_*[0-9a-fA-F])*",Yl={className:"number",variants:[{begin:`(\\b(${qt})((${kn})|\\.)?|(${kn}))[eE][+-]?(${qt}\
)[fFdD]?\\b`},{begin:`\\b(${qt})((${kn})[fFdD]?\\b|\\.([fFdD]\\b)?)`},{begin:`(${kn})[fFdD]?\\b`},{begin:`\\b(${qt})[fFdD]\\b`},{begin:`\\b0[xX]((${Sn})\\.?|(${Sn}\
)?\\.(${Sn}))[pP][+-]?(${qt})[fFdD]?\\b`},{begin:"\\b(0|[1-9](_*[0-9])*)[lL]?\\b"},{begin:`\\b0[xX](${Sn})[lL]?\\b`},{begin:"\\b0(_*[0-7])*[lL]?\\b"},{begin:"\\b\
0[bB][01](_*[01])*[lL]?\\b"}],relevance:0};function ia(e){let t={keyword:"abstract as val var vararg get set class object open private protected public noinline\
 crossinline dynamic final enum if else do while for when throw try catch finally import package is in fun override companion reified inline lateinit init inter\
face annotation data sealed internal infix operator out by constructor super tailrec where const inner suspend typealias external expect actual",built_in:"Byte \
Short Char Int Long Boolean Float Double Void Unit Nothing",literal:"true false null"},n={className:"keyword",begin:/\b(break|continue|return|this)\b/,starts:{contains:[
{className:"symbol",begin:/@\w+/}]}},r={className:"symbol",begin:e.UNDERSCORE_IDENT_RE+"@"},i={className:"subst",begin:/\$\{/,end:/\}/,contains:[e.C_NUMBER_MODE]},
o={className:"variable",begin:"\\$"+e.UNDERSCORE_IDENT_RE},a={className:"string",variants:[{begin:'"""',end:'"""(?=[^"])',contains:[o,i]},{begin:"'",end:"'",illegal:/\n/,
contains:[e.BACKSLASH_ESCAPE]},{begin:'"',end:'"',illegal:/\n/,contains:[e.BACKSLASH_ESCAPE,o,i]}]};i.contains.push(a);let l={className:"meta",begin:"@(?:file|p\
roperty|field|get|set|receiver|param|setparam|delegate)\\s*:(?:\\s*"+e.UNDERSCORE_IDENT_RE+")?"},u={className:"meta",begin:"@"+e.UNDERSCORE_IDENT_RE,contains:[{
begin:/\(/,end:/\)/,contains:[e.inherit(a,{className:"string"}),"self"]}]},d=Yl,p=e.COMMENT("/\\*","\\*/",{contains:[e.C_BLOCK_COMMENT_MODE]}),m={variants:[{className:"\
type",begin:e.UNDERSCORE_IDENT_RE},{begin:/\(/,end:/\)/,contains:[]}]},h=m;return h.variants[1].contains=[m],m.variants[1].contains=[h],{name:"Kotlin",aliases:[
"kt","kts"],keywords:t,contains:[e.COMMENT("/\\*\\*","\\*/",{relevance:0,contains:[{className:"doctag",begin:"@[A-Za-z]+"}]}),e.C_LINE_COMMENT_MODE,p,n,r,l,u,{className:"\
function",beginKeywords:"fun",end:"[(]|$",returnBegin:!0,excludeEnd:!0,keywords:t,relevance:5,contains:[{begin:e.UNDERSCORE_IDENT_RE+"\\s*\\(",returnBegin:!0,relevance:0,
contains:[e.UNDERSCORE_TITLE_MODE]},{className:"type",begin:/</,end:/>/,keywords:"reified",relevance:0},{className:"params",begin:/\(/,end:/\)/,endsParent:!0,keywords:t,
relevance:0,contains:[{begin:/:/,end:/[=,\/]/,endsWithParent:!0,contains:[m,e.C_LINE_COMMENT_MODE,p],relevance:0},e.C_LINE_COMMENT_MODE,p,l,u,a,e.C_NUMBER_MODE]},
p]},{begin:[/class|interface|trait/,/\s+/,e.UNDERSCORE_IDENT_RE],beginScope:{3:"title.class"},keywords:"class interface trait",end:/[:\{(]|$/,excludeEnd:!0,illegal:"\
extends implements",contains:[{beginKeywords:"public protected internal private constructor"},e.UNDERSCORE_TITLE_MODE,{className:"type",begin:/</,end:/>/,excludeBegin:!0,
excludeEnd:!0,relevance:0},{className:"type",begin:/[,:]\s*/,end:/[<\(,){\s]|$/,excludeBegin:!0,returnEnd:!0},l,u]},a,{className:"meta",begin:"^#!/usr/bin/env",
end:"$",illegal:`
`},d]}}var Xl=e=>({IMPORTANT:{scope:"meta",begin:"!important"},BLOCK_COMMENT:e.C_BLOCK_COMMENT_MODE,HEXCOLOR:{scope:"number",begin:/#(([0-9a-fA-F]{3,4})|(([0-9a-fA-F]{2}){3,4}))\b/},
UNICODE_RANGE:{scope:"number",begin:/\b[Uu]\+[0-9A-Fa-f][0-9A-Fa-f?]{0,4}(-[0-9A-Fa-f][0-9A-Fa-f]{0,4})?/},FUNCTION_DISPATCH:{className:"built_in",begin:/[\w-]+(?=\()/},
ATTRIBUTE_SELECTOR_MODE:{scope:"selector-attr",begin:/\[/,end:/\]/,illegal:"$",contains:[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE]},CSS_NUMBER_MODE:{scope:"number",
begin:e.NUMBER_RE+"(%|em|ex|ch|rem|vw|vh|vmin|vmax|cm|mm|in|pt|pc|px|deg|grad|rad|turn|s|ms|Hz|kHz|dpi|dpcm|dppx)?",relevance:0},CSS_VARIABLE:{className:"attr",
begin:/--[A-Za-z_][A-Za-z0-9_-]*/}}),Ql=["a","abbr","address","article","aside","audio","b","blockquote","body","button","canvas","caption","cite","code","dd","\
del","details","dfn","div","dl","dt","em","fieldset","figcaption","figure","footer","form","h1","h2","h3","h4","h5","h6","header","hgroup","html","i","iframe","\
img","input","ins","kbd","label","legend","li","main","mark","menu","nav","object","ol","optgroup","option","p","picture","q","quote","samp","section","select",
"source","span","strong","summary","sup","table","tbody","td","textarea","tfoot","th","thead","time","tr","ul","var","video"],jl=["defs","g","marker","mask","pa\
ttern","svg","switch","symbol","feBlend","feColorMatrix","feComponentTransfer","feComposite","feConvolveMatrix","feDiffuseLighting","feDisplacementMap","feFlood",
"feGaussianBlur","feImage","feMerge","feMorphology","feOffset","feSpecularLighting","feTile","feTurbulence","linearGradient","radialGradient","stop","circle","e\
llipse","image","line","path","polygon","polyline","rect","text","use","textPath","tspan","foreignObject","clipPath"],Jl=[...Ql,...jl],ec=["any-hover","any-poin\
ter","aspect-ratio","color","color-gamut","color-index","device-aspect-ratio","device-height","device-width","display-mode","forced-colors","grid","height","hov\
er","inverted-colors","monochrome","orientation","overflow-block","overflow-inline","pointer","prefers-color-scheme","prefers-contrast","prefers-reduced-motion",
"prefers-reduced-transparency","resolution","scan","scripting","update","width","min-width","max-width","min-height","max-height"].sort().reverse(),aa=["active",
"any-link","blank","checked","current","default","defined","dir","disabled","drop","empty","enabled","first","first-child","first-of-type","fullscreen","future",
"focus","focus-visible","focus-within","has","host","host-context","hover","indeterminate","in-range","invalid","is","lang","last-child","last-of-type","left","\
link","local-link","not","nth-child","nth-col","nth-last-child","nth-last-col","nth-last-of-type","nth-of-type","only-child","only-of-type","optional","out-of-r\
ange","past","placeholder-shown","read-only","read-write","required","right","root","scope","target","target-within","user-invalid","valid","visited","where"].sort().
reverse(),oa=["after","backdrop","before","cue","cue-region","first-letter","first-line","grammar-error","marker","part","placeholder","selection","slotted","sp\
elling-error"].sort().reverse(),tc=["accent-color","align-content","align-items","align-self","alignment-baseline","all","anchor-name","animation","animation-co\
mposition","animation-delay","animation-direction","animation-duration","animation-fill-mode","animation-iteration-count","animation-name","animation-play-state",
"animation-range","animation-range-end","animation-range-start","animation-timeline","animation-timing-function","appearance","aspect-ratio","backdrop-filter","\
backface-visibility","background","background-attachment","background-blend-mode","background-clip","background-color","background-image","background-origin","b\
ackground-position","background-position-x","background-position-y","background-repeat","background-size","baseline-shift","block-size","border","border-block",
"border-block-color","border-block-end","border-block-end-color","border-block-end-style","border-block-end-width","border-block-start","border-block-start-colo\
r","border-block-start-style","border-block-start-width","border-block-style","border-block-width","border-bottom","border-bottom-color","border-bottom-left-rad\
ius","border-bottom-right-radius","border-bottom-style","border-bottom-width","border-collapse","border-color","border-end-end-radius","border-end-start-radius",
"border-image","border-image-outset","border-image-repeat","border-image-slice","border-image-source","border-image-width","border-inline","border-inline-color",
"border-inline-end","border-inline-end-color","border-inline-end-style","border-inline-end-width","border-inline-start","border-inline-start-color","border-inli\
ne-start-style","border-inline-start-width","border-inline-style","border-inline-width","border-left","border-left-color","border-left-style","border-left-width",
"border-radius","border-right","border-right-color","border-right-style","border-right-width","border-spacing","border-start-end-radius","border-start-start-rad\
ius","border-style","border-top","border-top-color","border-top-left-radius","border-top-right-radius","border-top-style","border-top-width","border-width","bot\
tom","box-align","box-decoration-break","box-direction","box-flex","box-flex-group","box-lines","box-ordinal-group","box-orient","box-pack","box-shadow","box-si\
zing","break-after","break-before","break-inside","caption-side","caret-color","clear","clip","clip-path","clip-rule","color","color-interpolation","color-inter\
polation-filters","color-profile","color-rendering","color-scheme","column-count","column-fill","column-gap","column-rule","column-rule-color","column-rule-styl\
e","column-rule-width","column-span","column-width","columns","contain","contain-intrinsic-block-size","contain-intrinsic-height","contain-intrinsic-inline-size",
"contain-intrinsic-size","contain-intrinsic-width","container","container-name","container-type","content","content-visibility","counter-increment","counter-res\
et","counter-set","cue","cue-after","cue-before","cursor","cx","cy","direction","display","dominant-baseline","empty-cells","enable-background","field-sizing","\
fill","fill-opacity","fill-rule","filter","flex","flex-basis","flex-direction","flex-flow","flex-grow","flex-shrink","flex-wrap","float","flood-color","flood-op\
acity","flow","font","font-display","font-family","font-feature-settings","font-kerning","font-language-override","font-optical-sizing","font-palette","font-siz\
e","font-size-adjust","font-smooth","font-smoothing","font-stretch","font-style","font-synthesis","font-synthesis-position","font-synthesis-small-caps","font-sy\
nthesis-style","font-synthesis-weight","font-variant","font-variant-alternates","font-variant-caps","font-variant-east-asian","font-variant-emoji","font-variant\
-ligatures","font-variant-numeric","font-variant-position","font-variation-settings","font-weight","forced-color-adjust","gap","glyph-orientation-horizontal","g\
lyph-orientation-vertical","grid","grid-area","grid-auto-columns","grid-auto-flow","grid-auto-rows","grid-column","grid-column-end","grid-column-start","grid-ga\
p","grid-row","grid-row-end","grid-row-start","grid-template","grid-template-areas","grid-template-columns","grid-template-rows","hanging-punctuation","height",
"hyphenate-character","hyphenate-limit-chars","hyphens","icon","image-orientation","image-rendering","image-resolution","ime-mode","initial-letter","initial-let\
ter-align","inline-size","inset","inset-area","inset-block","inset-block-end","inset-block-start","inset-inline","inset-inline-end","inset-inline-start","isolat\
ion","justify-content","justify-items","justify-self","kerning","left","letter-spacing","lighting-color","line-break","line-height","line-height-step","list-sty\
le","list-style-image","list-style-position","list-style-type","margin","margin-block","margin-block-end","margin-block-start","margin-bottom","margin-inline","\
margin-inline-end","margin-inline-start","margin-left","margin-right","margin-top","margin-trim","marker","marker-end","marker-mid","marker-start","marks","mask",
"mask-border","mask-border-mode","mask-border-outset","mask-border-repeat","mask-border-slice","mask-border-source","mask-border-width","mask-clip","mask-compos\
ite","mask-image","mask-mode","mask-origin","mask-position","mask-repeat","mask-size","mask-type","masonry-auto-flow","math-depth","math-shift","math-style","ma\
x-block-size","max-height","max-inline-size","max-width","min-block-size","min-height","min-inline-size","min-width","mix-blend-mode","nav-down","nav-index","na\
v-left","nav-right","nav-up","none","normal","object-fit","object-position","offset","offset-anchor","offset-distance","offset-path","offset-position","offset-r\
otate","opacity","order","orphans","outline","outline-color","outline-offset","outline-style","outline-width","overflow","overflow-anchor","overflow-block","ove\
rflow-clip-margin","overflow-inline","overflow-wrap","overflow-x","overflow-y","overlay","overscroll-behavior","overscroll-behavior-block","overscroll-behavior-\
inline","overscroll-behavior-x","overscroll-behavior-y","padding","padding-block","padding-block-end","padding-block-start","padding-bottom","padding-inline","p\
adding-inline-end","padding-inline-start","padding-left","padding-right","padding-top","page","page-break-after","page-break-before","page-break-inside","paint-\
order","pause","pause-after","pause-before","perspective","perspective-origin","place-content","place-items","place-self","pointer-events","position","position-\
anchor","position-visibility","print-color-adjust","quotes","r","resize","rest","rest-after","rest-before","right","rotate","row-gap","ruby-align","ruby-positio\
n","scale","scroll-behavior","scroll-margin","scroll-margin-block","scroll-margin-block-end","scroll-margin-block-start","scroll-margin-bottom","scroll-margin-i\
nline","scroll-margin-inline-end","scroll-margin-inline-start","scroll-margin-left","scroll-margin-right","scroll-margin-top","scroll-padding","scroll-padding-b\
lock","scroll-padding-block-end","scroll-padding-block-start","scroll-padding-bottom","scroll-padding-inline","scroll-padding-inline-end","scroll-padding-inline\
-start","scroll-padding-left","scroll-padding-right","scroll-padding-top","scroll-snap-align","scroll-snap-stop","scroll-snap-type","scroll-timeline","scroll-ti\
meline-axis","scroll-timeline-name","scrollbar-color","scrollbar-gutter","scrollbar-width","shape-image-threshold","shape-margin","shape-outside","shape-renderi\
ng","speak","speak-as","src","stop-color","stop-opacity","stroke","stroke-dasharray","stroke-dashoffset","stroke-linecap","stroke-linejoin","stroke-miterlimit",
"stroke-opacity","stroke-width","tab-size","table-layout","text-align","text-align-all","text-align-last","text-anchor","text-combine-upright","text-decoration",
"text-decoration-color","text-decoration-line","text-decoration-skip","text-decoration-skip-ink","text-decoration-style","text-decoration-thickness","text-empha\
sis","text-emphasis-color","text-emphasis-position","text-emphasis-style","text-indent","text-justify","text-orientation","text-overflow","text-rendering","text\
-shadow","text-size-adjust","text-transform","text-underline-offset","text-underline-position","text-wrap","text-wrap-mode","text-wrap-style","timeline-scope","\
top","touch-action","transform","transform-box","transform-origin","transform-style","transition","transition-behavior","transition-delay","transition-duration",
"transition-property","transition-timing-function","translate","unicode-bidi","unicode-range","user-modify","user-select","vector-effect","vertical-align","view\
-timeline","view-timeline-axis","view-timeline-inset","view-timeline-name","view-transition-name","visibility","voice-balance","voice-duration","voice-family","\
voice-pitch","voice-range","voice-rate","voice-stress","voice-volume","white-space","white-space-collapse","widows","width","will-change","word-break","word-spa\
cing","word-wrap","writing-mode","x","y","z-index","zoom"].sort().reverse(),nc=aa.concat(oa).sort().reverse();function sa(e){let t=Xl(e),n=nc,r="and or not only",
i="[\\w-]+",o="("+i+"|@\\{"+i+"\\})",a=[],l=[],u=function(D){return{className:"string",begin:"~?"+D+".*?"+D}},d=function(D,q,z){return{className:D,begin:q,relevance:z}},
p={$pattern:/[a-z-]+/,keyword:r,attribute:ec.join(" ")},m={begin:"\\(",end:"\\)",contains:l,keywords:p,relevance:0};l.push(e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,
u("'"),u('"'),t.CSS_NUMBER_MODE,{begin:"(url|data-uri)\\(",starts:{className:"string",end:"[\\)\\n]",excludeEnd:!0}},t.UNICODE_RANGE,t.HEXCOLOR,m,d("variable","\
@@?"+i,10),d("variable","@\\{"+i+"\\}"),d("built_in","~?`[^`]*?`"),{className:"attribute",begin:i+"\\s*:",end:":",returnBegin:!0,excludeEnd:!0},t.IMPORTANT,{beginKeywords:"\
and not"},t.FUNCTION_DISPATCH);let h=l.concat({begin:/\{/,end:/\}/,contains:a}),f={beginKeywords:"when",endsWithParent:!0,contains:[{beginKeywords:"and not"}].concat(
l)},_={begin:o+"\\s*:",returnBegin:!0,end:/[;}]/,relevance:0,contains:[{begin:/-(webkit|moz|ms|o)-/},t.CSS_VARIABLE,{className:"attribute",begin:"\\b("+tc.join(
"|")+")\\b",end:/(?=:)/,starts:{endsWithParent:!0,illegal:"[<=$]",relevance:0,contains:l}}]},C={className:"keyword",begin:"@(import|media|charset|font-face|(-[a\
-z]+-)?keyframes|supports|document|namespace|page|viewport|host)\\b",starts:{end:"[;{}]",keywords:p,returnEnd:!0,contains:l,relevance:0}},T={className:"variable",
variants:[{begin:"@"+i+"\\s*:",relevance:15},{begin:"@"+i}],starts:{end:"[;}]",returnEnd:!0,contains:h}},E={variants:[{begin:"[\\.#:&\\[>]",end:"[;{}]"},{begin:o,
end:/\{/}],returnBegin:!0,returnEnd:!0,illegal:`[<='$"]`,relevance:0,contains:[e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,f,d("keyword","all\\b"),d("variable",
"@\\{"+i+"\\}"),{begin:"\\b("+Jl.join("|")+")\\b",className:"selector-tag"},t.CSS_NUMBER_MODE,d("selector-tag",o,0),d("selector-id","#"+o),d("selector-class","\\\
."+o,0),d("selector-tag","&",0),t.ATTRIBUTE_SELECTOR_MODE,{className:"selector-pseudo",begin:":("+aa.join("|")+")"},{className:"selector-pseudo",begin:":(:)?("+
oa.join("|")+")"},{begin:/\(/,end:/\)/,relevance:0,contains:h},{begin:"!important"},t.FUNCTION_DISPATCH]},v={begin:i+`:(:)?(${n.join("|")})`,returnBegin:!0,contains:[
E]};return a.push(e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,C,T,v,_,E,f,t.FUNCTION_DISPATCH),{name:"Less",case_insensitive:!0,illegal:`[=>'/<($"]`,contains:a}}function la(e){let t="\\[=*\\[",n="\\]=*\\]",r={begin:t,end:n,contains:["self"]},i=[e.COMMENT("--(?!"+t+")","$"),e.COMMENT("--"+t,n,{contains:[r],relevance:10})];
return{name:"Lua",aliases:["pluto"],keywords:{$pattern:e.UNDERSCORE_IDENT_RE,literal:"true false nil",keyword:"and break do else elseif end for goto if in local\
 not or repeat return then until while",built_in:"_G _ENV _VERSION __index __newindex __mode __call __metatable __tostring __len __gc __add __sub __mul __div __\
mod __pow __concat __unm __eq __lt __le assert collectgarbage dofile error getfenv getmetatable ipairs load loadfile loadstring module next pairs pcall print ra\
wequal rawget rawset require select setfenv setmetatable tonumber tostring type unpack xpcall arg self coroutine resume yield status wrap create running debug g\
etupvalue debug sethook getmetatable gethook setmetatable setlocal traceback setfenv getinfo setupvalue getlocal getregistry getfenv io lines write close flush \
open output type read stderr stdin input stdout popen tmpfile math log max acos huge ldexp pi cos tanh pow deg tan cosh sinh random randomseed frexp ceil floor \
rad abs sqrt modf asin min mod fmod log10 atan2 exp sin atan os exit setlocale date getenv difftime remove time clock tmpname rename execute package preload loa\
dlib loaded loaders cpath config path seeall string sub upper len gfind rep find match char dump gmatch reverse byte format gsub lower table setn insert getn fo\
reachi maxn foreach concat sort remove"},contains:i.concat([{className:"function",beginKeywords:"function",end:"\\)",contains:[e.inherit(e.TITLE_MODE,{begin:"([\
_a-zA-Z]\\w*\\.)*([_a-zA-Z]\\w*:)?[_a-zA-Z]\\w*"}),{className:"params",begin:"\\(",endsWithParent:!0,contains:i}].concat(i)},e.C_NUMBER_MODE,e.APOS_STRING_MODE,
e.QUOTE_STRING_MODE,{className:"string",begin:t,end:n,contains:[r],relevance:5}])}}function ca(e){let t={className:"variable",variants:[{begin:"\\$\\("+e.UNDERSCORE_IDENT_RE+"\\)",contains:[e.BACKSLASH_ESCAPE]},{begin:/\$[@%<?\^\+\*]/}]},n={className:"\
string",begin:/"/,end:/"/,contains:[e.BACKSLASH_ESCAPE,t]},r={className:"variable",begin:/\$\([\w-]+\s/,end:/\)/,keywords:{built_in:"subst patsubst strip findst\
ring filter filter-out sort word wordlist firstword lastword dir notdir suffix basename addsuffix addprefix join wildcard realpath abspath error warning shell o\
rigin flavor foreach if or and call eval file value"},contains:[t,n]},i={begin:"^"+e.UNDERSCORE_IDENT_RE+"\\s*(?=[:+?]?=)"},o={className:"meta",begin:/^\.PHONY:/,
end:/$/,keywords:{$pattern:/[\.\w]+/,keyword:".PHONY"}},a={className:"section",begin:/^[^\s]+:/,end:/$/,contains:[t]};return{name:"Makefile",aliases:["mk","mak",
"make"],keywords:{$pattern:/[\w-]+/,keyword:"define endef undefine ifdef ifndef ifeq ifneq else endif include -include sinclude override export unexport private\
 vpath"},contains:[e.HASH_COMMENT_MODE,t,n,r,i,o,a]}}function ua(e){let t=e.regex,n={begin:/<\/?[A-Za-z_]/,end:">",subLanguage:"xml",relevance:0},r={begin:"^[-\\*]{3,}",end:"$"},i={className:"code",variants:[{begin:"\
(`{3,})[^`](.|\\n)*?\\1`*[ ]*"},{begin:"(~{3,})[^~](.|\\n)*?\\1~*[ ]*"},{begin:"```",end:"```+[ ]*$"},{begin:"~~~",end:"~~~+[ ]*$"},{begin:"`.+?`"},{begin:"(?=^\
( {4}|\\t))",contains:[{begin:"^( {4}|\\t)",end:"(\\n)$"}],relevance:0}]},o={className:"bullet",begin:"^[ 	]*([*+-]|(\\d+\\.))(?=\\s+)",end:"\\s+",excludeEnd:!0},
a={begin:/^\[[^\n]+\]:/,returnBegin:!0,contains:[{className:"symbol",begin:/\[/,end:/\]/,excludeBegin:!0,excludeEnd:!0},{className:"link",begin:/:\s*/,end:/$/,excludeBegin:!0}]},
l=/[A-Za-z][A-Za-z0-9+.-]*/,u={variants:[{begin:/\[.+?\]\[.*?\]/,relevance:0},{begin:/\[.+?\]\(((data|javascript|mailto):|(?:http|ftp)s?:\/\/).*?\)/,relevance:2},
{begin:t.concat(/\[.+?\]\(/,l,/:\/\/.*?\)/),relevance:2},{begin:/\[.+?\]\([./?&#].*?\)/,relevance:1},{begin:/\[.*?\]\(.*?\)/,relevance:0}],returnBegin:!0,contains:[
{match:/\[(?=\])/},{className:"string",relevance:0,begin:"\\[",end:"\\]",excludeBegin:!0,returnEnd:!0},{className:"link",relevance:0,begin:"\\]\\(",end:"\\)",excludeBegin:!0,
excludeEnd:!0},{className:"symbol",relevance:0,begin:"\\]\\[",end:"\\]",excludeBegin:!0,excludeEnd:!0}]},d={className:"strong",contains:[],variants:[{begin:/_{2}(?!\s)/,
end:/_{2}/},{begin:/\*{2}(?!\s)/,end:/\*{2}/}]},p={className:"emphasis",contains:[],variants:[{begin:/\*(?![*\s])/,end:/\*/},{begin:/_(?![_\s])/,end:/_/,relevance:0}]},
m=e.inherit(d,{contains:[]}),h=e.inherit(p,{contains:[]});d.contains.push(h),p.contains.push(m);let f=[n,u];return[d,p,m,h].forEach(E=>{E.contains=E.contains.concat(
f)}),f=f.concat(d,p),{name:"Markdown",aliases:["md","mkdown","mkd"],contains:[{className:"section",variants:[{begin:"^#{1,6}",end:"$",contains:f},{begin:"(?=^.+\
?\\n[=-]{2,}$)",contains:[{begin:"^[=-]*$"},{begin:"^",end:"\\n",contains:f}]}]},n,o,d,p,{className:"quote",begin:"^>\\s+",contains:f,end:"$"},i,r,u,a,{scope:"l\
iteral",match:/&([a-zA-Z0-9]+|#[0-9]{1,7}|#[Xx][0-9a-fA-F]{1,6});/}]}}function da(e){let t={className:"built_in",begin:"\\b(AV|CA|CF|CG|CI|CL|CM|CN|CT|MK|MP|MTK|MTL|NS|SCN|SK|UI|WK|XC)\\w+"},n=/[a-zA-Z@][a-zA-Z0-9_]*/,l={"variable\
.language":["this","super"],$pattern:n,keyword:["while","export","sizeof","typedef","const","struct","for","union","volatile","static","mutable","if","do","retu\
rn","goto","enum","else","break","extern","asm","case","default","register","explicit","typename","switch","continue","inline","readonly","assign","readwrite","\
self","@synchronized","id","typeof","nonatomic","IBOutlet","IBAction","strong","weak","copy","in","out","inout","bycopy","byref","oneway","__strong","__weak","_\
_block","__autoreleasing","@private","@protected","@public","@try","@property","@end","@throw","@catch","@finally","@autoreleasepool","@synthesize","@dynamic","\
@selector","@optional","@required","@encode","@package","@import","@defs","@compatibility_alias","__bridge","__bridge_transfer","__bridge_retained","__bridge_re\
tain","__covariant","__contravariant","__kindof","_Nonnull","_Nullable","_Null_unspecified","__FUNCTION__","__PRETTY_FUNCTION__","__attribute__","getter","sette\
r","retain","unsafe_unretained","nonnull","nullable","null_unspecified","null_resettable","class","instancetype","NS_DESIGNATED_INITIALIZER","NS_UNAVAILABLE","N\
S_REQUIRES_SUPER","NS_RETURNS_INNER_POINTER","NS_INLINE","NS_AVAILABLE","NS_DEPRECATED","NS_ENUM","NS_OPTIONS","NS_SWIFT_UNAVAILABLE","NS_ASSUME_NONNULL_BEGIN",
"NS_ASSUME_NONNULL_END","NS_REFINED_FOR_SWIFT","NS_SWIFT_NAME","NS_SWIFT_NOTHROW","NS_DURING","NS_HANDLER","NS_ENDHANDLER","NS_VALUERETURN","NS_VOIDRETURN"],literal:[
"false","true","FALSE","TRUE","nil","YES","NO","NULL"],built_in:["dispatch_once_t","dispatch_queue_t","dispatch_sync","dispatch_async","dispatch_once"],type:["i\
nt","float","char","unsigned","signed","short","long","double","wchar_t","unichar","void","bool","BOOL","id|0","_Bool"]},u={$pattern:n,keyword:["@interface","@c\
lass","@protocol","@implementation"]};return{name:"Objective-C",aliases:["mm","objc","obj-c","obj-c++","objective-c++"],keywords:l,illegal:"</",contains:[t,e.C_LINE_COMMENT_MODE,
e.C_BLOCK_COMMENT_MODE,e.C_NUMBER_MODE,e.QUOTE_STRING_MODE,e.APOS_STRING_MODE,{className:"string",variants:[{begin:'@"',end:'"',illegal:"\\n",contains:[e.BACKSLASH_ESCAPE]}]},
{className:"meta",begin:/#\s*[a-z]+\b/,end:/$/,keywords:{keyword:"if else elif endif define undef warning error line pragma ifdef ifndef include"},contains:[{begin:/\\\n/,
relevance:0},e.inherit(e.QUOTE_STRING_MODE,{className:"string"}),{className:"string",begin:/<.*?>/,end:/$/,illegal:"\\n"},e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE]},
{className:"class",begin:"("+u.keyword.join("|")+")\\b",end:/(\{|$)/,excludeEnd:!0,keywords:u,contains:[e.UNDERSCORE_TITLE_MODE]},{begin:"\\."+e.UNDERSCORE_IDENT_RE,
relevance:0}]}}function pa(e){let t=e.regex,n=["abs","accept","alarm","and","atan2","bind","binmode","bless","break","caller","chdir","chmod","chomp","chop","chown","chr","chr\
oot","class","close","closedir","connect","continue","cos","crypt","dbmclose","dbmopen","defined","delete","die","do","dump","each","else","elsif","endgrent","e\
ndhostent","endnetent","endprotoent","endpwent","endservent","eof","eval","exec","exists","exit","exp","fcntl","field","fileno","flock","for","foreach","fork","\
format","formline","getc","getgrent","getgrgid","getgrnam","gethostbyaddr","gethostbyname","gethostent","getlogin","getnetbyaddr","getnetbyname","getnetent","ge\
tpeername","getpgrp","getpriority","getprotobyname","getprotobynumber","getprotoent","getpwent","getpwnam","getpwuid","getservbyname","getservbyport","getserven\
t","getsockname","getsockopt","given","glob","gmtime","goto","grep","gt","hex","if","index","int","ioctl","join","keys","kill","last","lc","lcfirst","length","l\
ink","listen","local","localtime","log","lstat","lt","ma","map","method","mkdir","msgctl","msgget","msgrcv","msgsnd","my","ne","next","no","not","oct","open","o\
pendir","or","ord","our","pack","package","pipe","pop","pos","print","printf","prototype","push","q|0","qq","quotemeta","qw","qx","rand","read","readdir","readl\
ine","readlink","readpipe","recv","redo","ref","rename","require","reset","return","reverse","rewinddir","rindex","rmdir","say","scalar","seek","seekdir","selec\
t","semctl","semget","semop","send","setgrent","sethostent","setnetent","setpgrp","setpriority","setprotoent","setpwent","setservent","setsockopt","shift","shmc\
tl","shmget","shmread","shmwrite","shutdown","sin","sleep","socket","socketpair","sort","splice","split","sprintf","sqrt","srand","stat","state","study","sub","\
substr","symlink","syscall","sysopen","sysread","sysseek","system","syswrite","tell","telldir","tie","tied","time","times","tr","truncate","uc","ucfirst","umask",
"undef","unless","unlink","unpack","unshift","untie","until","use","utime","values","vec","wait","waitpid","wantarray","warn","when","while","write","x|0","xor",
"y|0"],r=/[dualxmsipngr]{0,12}/,i={$pattern:/[\w.]+/,keyword:n.join(" ")},o={className:"subst",begin:"[$@]\\{",end:"\\}",keywords:i},a={begin:/->\{/,end:/\}/},l={
scope:"attr",match:/\s+:\s*\w+(\s*\(.*?\))?/},u={scope:"variable",variants:[{begin:/\$\d/},{begin:t.concat(/[$%@](?!")(\^\w\b|#\w+(::\w+)*|\{\w+\}|\w+(::\w*)*)/,
"(?![A-Za-z])(?![@$%])")},{begin:/[$%@](?!")[^\s\w{=]|\$=/,relevance:0}],contains:[l]},d={className:"number",variants:[{match:/0?\.[0-9][0-9_]+\b/},{match:/\bv?(0|[1-9][0-9_]*(\.[0-9_]+)?|[1-9][0-9_]*)\b/},
{match:/\b0[0-7][0-7_]*\b/},{match:/\b0x[0-9a-fA-F][0-9a-fA-F_]*\b/},{match:/\b0b[0-1][0-1_]*\b/}],relevance:0},p=[e.BACKSLASH_ESCAPE,o,u],m=[/!/,/\//,/\|/,/\?/,
/'/,/"/,/#/],h=(C,T,E="\\1")=>{let v=E==="\\1"?E:t.concat(E,T);return t.concat(t.concat("(?:",C,")"),T,/(?:\\.|[^\\\/])*?/,v,/(?:\\.|[^\\\/])*?/,E,r)},f=(C,T,E)=>t.
concat(t.concat("(?:",C,")"),T,/(?:\\.|[^\\\/])*?/,E,r),_=[u,e.HASH_COMMENT_MODE,e.COMMENT(/^=\w/,/=cut/,{endsWithParent:!0}),a,{className:"string",contains:p,variants:[
{begin:"q[qwxr]?\\s*\\(",end:"\\)",relevance:5},{begin:"q[qwxr]?\\s*\\[",end:"\\]",relevance:5},{begin:"q[qwxr]?\\s*\\{",end:"\\}",relevance:5},{begin:"q[qwxr]?\
\\s*\\|",end:"\\|",relevance:5},{begin:"q[qwxr]?\\s*<",end:">",relevance:5},{begin:"qw\\s+q",end:"q",relevance:5},{begin:"'",end:"'",contains:[e.BACKSLASH_ESCAPE]},
{begin:'"',end:'"'},{begin:"`",end:"`",contains:[e.BACKSLASH_ESCAPE]},{begin:/\{\w+\}/,relevance:0},{begin:"-?\\w+\\s*=>",relevance:0}]},d,{begin:"(\\/\\/|"+e.RE_STARTERS_RE+
"|\\b(split|return|print|reverse|grep)\\b)\\s*",keywords:"split return print reverse grep",relevance:0,contains:[e.HASH_COMMENT_MODE,{className:"regexp",variants:[
{begin:h("s|tr|y",t.either(...m,{capture:!0}))},{begin:h("s|tr|y","\\(","\\)")},{begin:h("s|tr|y","\\[","\\]")},{begin:h("s|tr|y","\\{","\\}")}],relevance:2},{className:"\
regexp",variants:[{begin:/(m|qr)\/\//,relevance:0},{begin:f("(?:m|qr)?",/\//,/\//)},{begin:f("m|qr",t.either(...m,{capture:!0}),/\1/)},{begin:f("m|qr",/\(/,/\)/)},
{begin:f("m|qr",/\[/,/\]/)},{begin:f("m|qr",/\{/,/\}/)}]}]},{className:"function",beginKeywords:"sub method",end:"(\\s*\\(.*?\\))?[;{]",excludeEnd:!0,relevance:5,
contains:[e.TITLE_MODE,l]},{className:"class",beginKeywords:"class",end:"[;{]",excludeEnd:!0,relevance:5,contains:[e.TITLE_MODE,l,d]},{begin:"-\\w\\b",relevance:0},
{begin:"^__DATA__$",end:"^__END__$",subLanguage:"mojolicious",contains:[{begin:"^@@.*",end:"$",className:"comment"}]}];return o.contains=_,a.contains=_,{name:"P\
erl",aliases:["pl","pm"],keywords:i,contains:_}}function ma(e){let t=e.regex,n=/(?![A-Za-z0-9])(?![$])/,r=t.concat(/[a-zA-Z_\x7f-\xff][a-zA-Z0-9_\x7f-\xff]*/,n),i=t.concat(/(\\?[A-Z][a-z0-9_\x7f-\xff]+|\\?[A-Z]+(?=[A-Z][a-z0-9_\x7f-\xff])){1,}/,
n),o=t.concat(/[A-Z]+/,n),a={scope:"variable",match:"\\$+"+r},l={scope:"meta",variants:[{begin:/<\?php/,relevance:10},{begin:/<\?=/},{begin:/<\?/,relevance:.1},
{begin:/\?>/}]},u={scope:"subst",variants:[{begin:/\$\w+/},{begin:/\{\$/,end:/\}/}]},d=e.inherit(e.APOS_STRING_MODE,{illegal:null}),p=e.inherit(e.QUOTE_STRING_MODE,
{illegal:null,contains:e.QUOTE_STRING_MODE.contains.concat(u)}),m={begin:/<<<[ \t]*(?:(\w+)|"(\w+)")\n/,end:/[ \t]*(\w+)\b/,contains:e.QUOTE_STRING_MODE.contains.
concat(u),"on:begin":(j,Q)=>{Q.data._beginMatch=j[1]||j[2]},"on:end":(j,Q)=>{Q.data._beginMatch!==j[1]&&Q.ignoreMatch()}},h=e.END_SAME_AS_BEGIN({begin:/<<<[ \t]*'(\w+)'\n/,
end:/[ \t]*(\w+)\b/}),f=`[ 	
]`,_={scope:"string",variants:[p,d,m,h]},C={scope:"number",variants:[{begin:"\\b0[bB][01]+(?:_[01]+)*\\b"},{begin:"\\b0[oO][0-7]+(?:_[0-7]+)*\\b"},{begin:"\\b0[x\
X][\\da-fA-F]+(?:_[\\da-fA-F]+)*\\b"},{begin:"(?:\\b\\d+(?:_\\d+)*(\\.(?:\\d+(?:_\\d+)*))?|\\B\\.\\d+)(?:[eE][+-]?\\d+)?"}],relevance:0},T=["false","null","true"],
E=["__CLASS__","__DIR__","__FILE__","__FUNCTION__","__COMPILER_HALT_OFFSET__","__LINE__","__METHOD__","__NAMESPACE__","__TRAIT__","die","echo","exit","include",
"include_once","print","require","require_once","array","abstract","and","as","binary","bool","boolean","break","callable","case","catch","class","clone","const",
"continue","declare","default","do","double","else","elseif","empty","enddeclare","endfor","endforeach","endif","endswitch","endwhile","enum","eval","extends","\
final","finally","float","for","foreach","from","global","goto","if","implements","instanceof","insteadof","int","integer","interface","isset","iterable","list",
"match|0","mixed","new","never","object","or","private","protected","public","readonly","real","return","string","switch","throw","trait","try","unset","use","v\
ar","void","while","xor","yield"],v=["Error|0","AppendIterator","ArgumentCountError","ArithmeticError","ArrayIterator","ArrayObject","AssertionError","BadFuncti\
onCallException","BadMethodCallException","CachingIterator","CallbackFilterIterator","CompileError","Countable","DirectoryIterator","DivisionByZeroError","Domai\
nException","EmptyIterator","ErrorException","Exception","FilesystemIterator","FilterIterator","GlobIterator","InfiniteIterator","InvalidArgumentException","Ite\
ratorIterator","LengthException","LimitIterator","LogicException","MultipleIterator","NoRewindIterator","OutOfBoundsException","OutOfRangeException","OuterItera\
tor","OverflowException","ParentIterator","ParseError","RangeException","RecursiveArrayIterator","RecursiveCachingIterator","RecursiveCallbackFilterIterator","R\
ecursiveDirectoryIterator","RecursiveFilterIterator","RecursiveIterator","RecursiveIteratorIterator","RecursiveRegexIterator","RecursiveTreeIterator","RegexIter\
ator","RuntimeException","SeekableIterator","SplDoublyLinkedList","SplFileInfo","SplFileObject","SplFixedArray","SplHeap","SplMaxHeap","SplMinHeap","SplObjectSt\
orage","SplObserver","SplPriorityQueue","SplQueue","SplStack","SplSubject","SplTempFileObject","TypeError","UnderflowException","UnexpectedValueException","Unha\
ndledMatchError","ArrayAccess","BackedEnum","Closure","Fiber","Generator","Iterator","IteratorAggregate","Serializable","Stringable","Throwable","Traversable","\
UnitEnum","WeakReference","WeakMap","Directory","__PHP_Incomplete_Class","parent","php_user_filter","self","static","stdClass"],q={keyword:E,literal:(j=>{let Q=[];
return j.forEach(R=>{Q.push(R),R.toLowerCase()===R?Q.push(R.toUpperCase()):Q.push(R.toLowerCase())}),Q})(T),built_in:v},z=j=>j.map(Q=>Q.replace(/\|\d+$/,"")),A={
variants:[{match:[/new/,t.concat(f,"+"),t.concat("(?!",z(v).join("\\b|"),"\\b)"),i],scope:{1:"keyword",4:"title.class"}}]},Z=t.concat(r,"\\b(?!\\()"),Y={variants:[
{match:[t.concat(/::/,t.lookahead(/(?!class\b)/)),Z],scope:{2:"variable.constant"}},{match:[/::/,/class/],scope:{2:"variable.language"}},{match:[i,t.concat(/::/,
t.lookahead(/(?!class\b)/)),Z],scope:{1:"title.class",3:"variable.constant"}},{match:[i,t.concat("::",t.lookahead(/(?!class\b)/))],scope:{1:"title.class"}},{match:[
i,/::/,/class/],scope:{1:"title.class",3:"variable.language"}}]},X={scope:"attr",match:t.concat(r,t.lookahead(":"),t.lookahead(/(?!::)/))},O={relevance:0,begin:/\(/,
end:/\)/,keywords:q,contains:[X,a,Y,e.C_BLOCK_COMMENT_MODE,e.C_LINE_COMMENT_MODE,e.HASH_COMMENT_MODE,_,C,A]},oe={relevance:0,match:[/\b/,t.concat("(?!fn\\b|funct\
ion\\b|",z(E).join("\\b|"),"|",z(v).join("\\b|"),"\\b)"),r,t.concat(f,"*"),t.lookahead(/(?=\()/)],scope:{3:"title.function.invoke"},contains:[O]};O.contains.push(
oe);let ie=[X,Y,e.C_BLOCK_COMMENT_MODE,e.C_LINE_COMMENT_MODE,e.HASH_COMMENT_MODE,_,C,A],W={begin:t.concat(/#\[\s*\\?/,t.either(i,o)),beginScope:"meta",end:/]/,endScope:"\
meta",keywords:{literal:T,keyword:["new","array"]},contains:[{begin:/\[/,end:/]/,keywords:{literal:T,keyword:["new","array"]},contains:["self",...ie]},...ie,{scope:"\
meta",variants:[{match:i},{match:o}]}]};return{case_insensitive:!1,keywords:q,contains:[W,e.HASH_COMMENT_MODE,e.COMMENT("//","$"),e.COMMENT("/\\*","\\*/",{contains:[
{scope:"doctag",match:"@[A-Za-z]+"}]}),{match:/__halt_compiler\(\);/,keywords:"__halt_compiler",starts:{scope:"comment",end:e.MATCH_NOTHING_RE,contains:[{match:/\?>/,
scope:"meta",endsParent:!0}]}},l,{scope:"variable.language",match:/\$this\b/},a,oe,Y,{match:[/const/,/\s/,r],scope:{1:"keyword",3:"variable.constant"}},A,{scope:"\
function",relevance:0,beginKeywords:"fn function",end:/[;{]/,excludeEnd:!0,illegal:"[$%\\[]",contains:[{beginKeywords:"use"},e.UNDERSCORE_TITLE_MODE,{begin:"=>",
endsParent:!0},{scope:"params",begin:"\\(",end:"\\)",excludeBegin:!0,excludeEnd:!0,keywords:q,contains:["self",W,a,Y,e.C_BLOCK_COMMENT_MODE,e.C_LINE_COMMENT_MODE,
e.HASH_COMMENT_MODE,_,C]}]},{scope:"class",variants:[{beginKeywords:"enum",illegal:/[($"]/},{beginKeywords:"class interface trait",illegal:/[:($"]/}],relevance:0,
end:/\{/,excludeEnd:!0,contains:[{beginKeywords:"extends implements"},e.UNDERSCORE_TITLE_MODE]},{beginKeywords:"namespace",relevance:0,end:";",illegal:/[.']/,contains:[
e.inherit(e.UNDERSCORE_TITLE_MODE,{scope:"title.class"})]},{beginKeywords:"use",relevance:0,end:";",contains:[{match:/\b(as|const|function)\b/,scope:"keyword"},
e.UNDERSCORE_TITLE_MODE]},_,C]}}function ha(e){return{name:"PHP template",subLanguage:"xml",contains:[{begin:/<\?(php|=)?/,end:/\?>/,subLanguage:"php",contains:[{begin:"/\\*",end:"\\*/",skip:!0},
{begin:'b"',end:'"',skip:!0},{begin:"b'",end:"'",skip:!0},e.inherit(e.APOS_STRING_MODE,{illegal:null,className:null,contains:null,skip:!0}),e.inherit(e.QUOTE_STRING_MODE,
{illegal:null,className:null,contains:null,skip:!0})]}]}}function fa(e){return{name:"Plain text",aliases:["text","txt"],disableAutodetect:!0}}function ga(e){let t=e.regex,n=/[\p{XID_Start}_]\p{XID_Continue}*/u,r=["and","as","assert","async","await","break","case","class","continue","def","del","elif",
"else","except","finally","for","from","global","if","import","in","is","lambda","match","nonlocal|10","not","or","pass","raise","return","try","while","with","\
yield"],l={$pattern:/[A-Za-z]\w+|__\w+__/,keyword:r,built_in:["__import__","abs","all","any","ascii","bin","bool","breakpoint","bytearray","bytes","callable","c\
hr","classmethod","compile","complex","delattr","dict","dir","divmod","enumerate","eval","exec","filter","float","format","frozenset","getattr","globals","hasat\
tr","hash","help","hex","id","input","int","isinstance","issubclass","iter","len","list","locals","map","max","memoryview","min","next","object","oct","open","o\
rd","pow","print","property","range","repr","reversed","round","set","setattr","slice","sorted","staticmethod","str","sum","super","tuple","type","vars","zip"],
literal:["__debug__","Ellipsis","False","None","NotImplemented","True"],type:["Any","Callable","Coroutine","Dict","List","Literal","Generic","Optional","Sequenc\
e","Set","Tuple","Type","Union"]},u={className:"meta",begin:/^(>>>|\.\.\.) /},d={className:"subst",begin:/\{/,end:/\}/,keywords:l,illegal:/#/},p={begin:/\{\{/,relevance:0},
m={className:"string",contains:[e.BACKSLASH_ESCAPE],variants:[{begin:/([uU]|[bB]|[rR]|[bB][rR]|[rR][bB])?'''/,end:/'''/,contains:[e.BACKSLASH_ESCAPE,u],relevance:10},
{begin:/([uU]|[bB]|[rR]|[bB][rR]|[rR][bB])?"""/,end:/"""/,contains:[e.BACKSLASH_ESCAPE,u],relevance:10},{begin:/([fF][rR]|[rR][fF]|[fF])'''/,end:/'''/,contains:[
e.BACKSLASH_ESCAPE,u,p,d]},{begin:/([fF][rR]|[rR][fF]|[fF])"""/,end:/"""/,contains:[e.BACKSLASH_ESCAPE,u,p,d]},{begin:/([uU]|[rR])'/,end:/'/,relevance:10},{begin:/([uU]|[rR])"/,
end:/"/,relevance:10},{begin:/([bB]|[bB][rR]|[rR][bB])'/,end:/'/},{begin:/([bB]|[bB][rR]|[rR][bB])"/,end:/"/},{begin:/([fF][rR]|[rR][fF]|[fF])'/,end:/'/,contains:[
e.BACKSLASH_ESCAPE,p,d]},{begin:/([fF][rR]|[rR][fF]|[fF])"/,end:/"/,contains:[e.BACKSLASH_ESCAPE,p,d]},e.APOS_STRING_MODE,e.QUOTE_STRING_MODE]},h="[0-9](_?[0-9]\
)*",f=`(\\b(${h}))?\\.(${h})|\\b(${h})\\.`,_=`\\b|${r.join("|")}`,C={className:"number",relevance:0,variants:[{begin:`(\\b(${h})|(${f}))[eE][+-]?(${h})[jJ]?(?=${_}\
)`},{begin:`(${f})[jJ]?`},{begin:`\\b([1-9](_?[0-9])*|0+(_?0)*)[lLjJ]?(?=${_})`},{begin:`\\b0[bB](_?[01])+[lL]?(?=${_})`},{begin:`\\b0[oO](_?[0-7])+[lL]?(?=${_}\
)`},{begin:`\\b0[xX](_?[0-9a-fA-F])+[lL]?(?=${_})`},{begin:`\\b(${h})[jJ](?=${_})`}]},T={className:"comment",begin:t.lookahead(/# type:/),end:/$/,keywords:l,contains:[
{begin:/# type:/},{begin:/#/,end:/\b\B/,endsWithParent:!0}]},E={className:"params",variants:[{className:"",begin:/\(\s*\)/,skip:!0},{begin:/\(/,end:/\)/,excludeBegin:!0,
excludeEnd:!0,keywords:l,contains:["self",u,C,m,e.HASH_COMMENT_MODE]}]};return d.contains=[m,C,u],{name:"Python",aliases:["py","gyp","ipython"],unicodeRegex:!0,
keywords:l,illegal:/(<\/|\?)|=>/,contains:[u,C,{scope:"variable.language",match:/\bself\b/},{beginKeywords:"if",relevance:0},{match:/\bor\b/,scope:"keyword"},m,
T,e.HASH_COMMENT_MODE,{match:[/\bdef/,/\s+/,n],scope:{1:"keyword",3:"title.function"},contains:[E]},{variants:[{match:[/\bclass/,/\s+/,n,/\s*/,/\(\s*/,n,/\s*\)/]},
{match:[/\bclass/,/\s+/,n]}],scope:{1:"keyword",3:"title.class",6:"title.class.inherited"}},{className:"meta",begin:/^[\t ]*@/,end:/(?=#)|$/,contains:[C,E,m]}]}}function ba(e){return{aliases:["pycon"],contains:[{className:"meta.prompt",starts:{end:/ |$/,starts:{end:"$",subLanguage:"python"}},variants:[{begin:/^>>>(?=[ ]|$)/},
{begin:/^\.\.\.(?=[ ]|$)/}]}]}}function xa(e){let t=e.regex,n=/(?:(?:[a-zA-Z]|\.[._a-zA-Z])[._a-zA-Z0-9]*)|\.(?!\d)/,r=t.either(/0[xX][0-9a-fA-F]+\.[0-9a-fA-F]*[pP][+-]?\d+i?/,/0[xX][0-9a-fA-F]+(?:[pP][+-]?\d+)?[Li]?/,
/(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?[Li]?/),i=/[=!<>:]=|\|\||&&|:::?|<-|<<-|->>|->|\|>|[-+*\/?!$&|:<=>@^~]|\*\*/,o=t.either(/[()]/,/[{}]/,/\[\[/,/[[\]]/,/\\/,
/,/);return{name:"R",keywords:{$pattern:n,keyword:"function if in break next repeat else for while",literal:"NULL NA TRUE FALSE Inf NaN NA_integer_|10 NA_real_|\
10 NA_character_|10 NA_complex_|10",built_in:"LETTERS letters month.abb month.name pi T F abs acos acosh all any anyNA Arg as.call as.character as.complex as.do\
uble as.environment as.integer as.logical as.null.default as.numeric as.raw asin asinh atan atanh attr attributes baseenv browser c call ceiling class Conj cos \
cosh cospi cummax cummin cumprod cumsum digamma dim dimnames emptyenv exp expression floor forceAndCall gamma gc.time globalenv Im interactive invisible is.arra\
y is.atomic is.call is.character is.complex is.double is.environment is.expression is.finite is.function is.infinite is.integer is.language is.list is.logical i\
s.matrix is.na is.name is.nan is.null is.numeric is.object is.pairlist is.raw is.recursive is.single is.symbol lazyLoadDBfetch length lgamma list log max min mi\
ssing Mod names nargs nzchar oldClass on.exit pos.to.env proc.time prod quote range Re rep retracemem return round seq_along seq_len seq.int sign signif sin sin\
h sinpi sqrt standardGeneric substitute sum switch tan tanh tanpi tracemem trigamma trunc unclass untracemem UseMethod xtfrm"},contains:[e.COMMENT(/#'/,/$/,{contains:[
{scope:"doctag",match:/@examples/,starts:{end:t.lookahead(t.either(/\n^#'\s*(?=@[a-zA-Z]+)/,/\n^(?!#')/)),endsParent:!0}},{scope:"doctag",begin:"@param",end:/$/,
contains:[{scope:"variable",variants:[{match:n},{match:/`(?:\\.|[^`\\])+`/}],endsParent:!0}]},{scope:"doctag",match:/@[a-zA-Z]+/},{scope:"keyword",match:/\\[a-zA-Z]+/}]}),
e.HASH_COMMENT_MODE,{scope:"string",contains:[e.BACKSLASH_ESCAPE],variants:[e.END_SAME_AS_BEGIN({begin:/[rR]"(-*)\(/,end:/\)(-*)"/}),e.END_SAME_AS_BEGIN({begin:/[rR]"(-*)\{/,
end:/\}(-*)"/}),e.END_SAME_AS_BEGIN({begin:/[rR]"(-*)\[/,end:/\](-*)"/}),e.END_SAME_AS_BEGIN({begin:/[rR]'(-*)\(/,end:/\)(-*)'/}),e.END_SAME_AS_BEGIN({begin:/[rR]'(-*)\{/,
end:/\}(-*)'/}),e.END_SAME_AS_BEGIN({begin:/[rR]'(-*)\[/,end:/\](-*)'/}),{begin:'"',end:'"',relevance:0},{begin:"'",end:"'",relevance:0}]},{relevance:0,variants:[
{scope:{1:"operator",2:"number"},match:[i,r]},{scope:{1:"operator",2:"number"},match:[/%[^%]*%/,r]},{scope:{1:"punctuation",2:"number"},match:[o,r]},{scope:{2:"\
number"},match:[/[^a-zA-Z0-9._]|^/,r]}]},{scope:{3:"operator"},match:[n,/\s+/,/<-/,/\s+/]},{scope:"operator",relevance:0,variants:[{match:i},{match:/%[^%]*%/}]},
{scope:"punctuation",relevance:0,match:o},{begin:"`",end:"`",contains:[{begin:/\\./}]}]}}function ya(e){let t=e.regex,n="([a-zA-Z_]\\w*[!?=]?|[-+~]@|<<|>>|=~|===?|<=>|[<>]=?|\\*\\*|[-/+%^&*~`|]|\\[\\]=?)",r=t.either(/\b([A-Z]+[a-z0-9]+)+/,/\b([A-Z]+[a-z0-9]+)+[A-Z]+/),
i=t.concat(r,/(::\w+)*/),a={"variable.constant":["__FILE__","__LINE__","__ENCODING__"],"variable.language":["self","super"],keyword:["alias","and","begin","BEGI\
N","break","case","class","defined","do","else","elsif","end","END","ensure","for","if","in","module","next","not","or","redo","require","rescue","retry","retur\
n","then","undef","unless","until","when","while","yield",...["include","extend","prepend","public","private","protected","raise","throw"]],built_in:["proc","la\
mbda","attr_accessor","attr_reader","attr_writer","define_method","private_constant","module_function"],literal:["true","false","nil"]},l={className:"doctag",begin:"\
@[A-Za-z]+"},u={begin:"#<",end:">"},d=[e.COMMENT("#","$",{contains:[l]}),e.COMMENT("^=begin","^=end",{contains:[l],relevance:10}),e.COMMENT("^__END__",e.MATCH_NOTHING_RE)],
p={className:"subst",begin:/#\{/,end:/\}/,keywords:a},m={className:"string",contains:[e.BACKSLASH_ESCAPE,p],variants:[{begin:/'/,end:/'/},{begin:/"/,end:/"/},{begin:/`/,
end:/`/},{begin:/%[qQwWx]?\(/,end:/\)/},{begin:/%[qQwWx]?\[/,end:/\]/},{begin:/%[qQwWx]?\{/,end:/\}/},{begin:/%[qQwWx]?</,end:/>/},{begin:/%[qQwWx]?\//,end:/\//},
{begin:/%[qQwWx]?%/,end:/%/},{begin:/%[qQwWx]?-/,end:/-/},{begin:/%[qQwWx]?\|/,end:/\|/},{begin:/\B\?(\\\d{1,3})/},{begin:/\B\?(\\x[A-Fa-f0-9]{1,2})/},{begin:/\B\?(\\u\{?[A-Fa-f0-9]{1,6}\}?)/},
{begin:/\B\?(\\M-\\C-|\\M-\\c|\\c\\M-|\\M-|\\C-\\M-)[\x20-\x7e]/},{begin:/\B\?\\(c|C-)[\x20-\x7e]/},{begin:/\B\?\\?\S/},{begin:t.concat(/<<[-~]?'?/,t.lookahead(
/(\w+)(?=\W)[^\n]*\n(?:[^\n]*\n)*?\s*\1\b/)),contains:[e.END_SAME_AS_BEGIN({begin:/(\w+)/,end:/(\w+)/,contains:[e.BACKSLASH_ESCAPE,p]})]}]},h="[1-9](_?[0-9])*|0",
f="[0-9](_?[0-9])*",_={className:"number",relevance:0,variants:[{begin:`\\b(${h})(\\.(${f}))?([eE][+-]?(${f})|r)?i?\\b`},{begin:"\\b0[dD][0-9](_?[0-9])*r?i?\\b"},
{begin:"\\b0[bB][0-1](_?[0-1])*r?i?\\b"},{begin:"\\b0[oO][0-7](_?[0-7])*r?i?\\b"},{begin:"\\b0[xX][0-9a-fA-F](_?[0-9a-fA-F])*r?i?\\b"},{begin:"\\b0(_?[0-7])+r?i?\
\\b"}]},C={variants:[{match:/\(\)/},{className:"params",begin:/\(/,end:/(?=\))/,excludeBegin:!0,endsParent:!0,keywords:a}]},A=[m,{variants:[{match:[/class\s+/,i,
/\s+<\s+/,i]},{match:[/\b(class|module)\s+/,i]}],scope:{2:"title.class",4:"title.class.inherited"},keywords:a},{match:[/(include|extend)\s+/,i],scope:{2:"title.\
class"},keywords:a},{relevance:0,match:[i,/\.new[. (]/],scope:{1:"title.class"}},{relevance:0,match:/\b[A-Z][A-Z_0-9]+\b/,className:"variable.constant"},{relevance:0,
match:r,scope:"title.class"},{match:[/def/,/\s+/,n],scope:{1:"keyword",3:"title.function"},contains:[C]},{begin:e.IDENT_RE+"::"},{className:"symbol",begin:e.UNDERSCORE_IDENT_RE+
"(!|\\?)?:",relevance:0},{className:"symbol",begin:":(?!\\s)",contains:[m,{begin:n}],relevance:0},_,{className:"variable",begin:"(\\$\\W)|((\\$|@@?)(\\w+))(?=[^@$?]\
)(?![A-Za-z])(?![@$?'])"},{className:"params",begin:/\|(?!=)/,end:/\|/,excludeBegin:!0,excludeEnd:!0,relevance:0,keywords:a},{begin:"("+e.RE_STARTERS_RE+"|unles\
s)\\s*",keywords:"unless",contains:[{className:"regexp",contains:[e.BACKSLASH_ESCAPE,p],illegal:/\n/,variants:[{begin:"/",end:"/[a-z]*"},{begin:/%r\{/,end:/\}[a-z]*/},
{begin:"%r\\(",end:"\\)[a-z]*"},{begin:"%r!",end:"![a-z]*"},{begin:"%r\\[",end:"\\][a-z]*"}]}].concat(u,d),relevance:0}].concat(u,d);p.contains=A,C.contains=A;let O=[
{begin:/^\s*=>/,starts:{end:"$",contains:A}},{className:"meta.prompt",begin:"^("+"[>?]>"+"|"+"[\\w#]+\\(\\w+\\):\\d+:\\d+[>*]"+"|"+"(\\w+-)?\\d+\\.\\d+\\.\\d+(p\\d+)?[\
^\\d][^>]+>"+")(?=[ ])",starts:{end:"$",keywords:a,contains:A}}];return d.unshift(u),{name:"Ruby",aliases:["rb","gemspec","podspec","thor","irb"],keywords:a,illegal:/\/\*/,
contains:[e.SHEBANG({binary:"ruby"})].concat(O).concat(d).concat(A)}}function wa(e){let t=e.regex,n=/(r#)?/,r=t.concat(n,e.UNDERSCORE_IDENT_RE),i=t.concat(n,e.IDENT_RE),o={className:"title.function.invoke",relevance:0,begin:t.concat(
/\b/,/(?!let|for|while|if|else|match\b)/,i,t.lookahead(/\s*\(/))},a="([ui](8|16|32|64|128|size)|f(32|64))?",l=["abstract","as","async","await","become","box","b\
reak","const","continue","crate","do","dyn","else","enum","extern","false","final","fn","for","if","impl","in","let","loop","macro","match","mod","move","mut","\
override","priv","pub","ref","return","self","Self","static","struct","super","trait","true","try","type","typeof","union","unsafe","unsized","use","virtual","w\
here","while","yield"],u=["true","false","Some","None","Ok","Err"],d=["drop ","Copy","Send","Sized","Sync","Drop","Fn","FnMut","FnOnce","ToOwned","Clone","Debug",
"PartialEq","PartialOrd","Eq","Ord","AsRef","AsMut","Into","From","Default","Iterator","Extend","IntoIterator","DoubleEndedIterator","ExactSizeIterator","SliceC\
oncatExt","ToString","assert!","assert_eq!","bitflags!","bytes!","cfg!","col!","concat!","concat_idents!","debug_assert!","debug_assert_eq!","env!","eprintln!",
"panic!","file!","format!","format_args!","include_bytes!","include_str!","line!","local_data_key!","module_path!","option_env!","print!","println!","select!","\
stringify!","try!","unimplemented!","unreachable!","vec!","write!","writeln!","macro_rules!","assert_ne!","debug_assert_ne!"],p=["i8","i16","i32","i64","i128","\
isize","u8","u16","u32","u64","u128","usize","f32","f64","str","char","bool","Box","Option","Result","String","Vec"];return{name:"Rust",aliases:["rs"],keywords:{
$pattern:e.IDENT_RE+"!?",type:p,keyword:l,literal:u,built_in:d},illegal:"</",contains:[e.C_LINE_COMMENT_MODE,e.COMMENT("/\\*","\\*/",{contains:["self"]}),e.inherit(
e.QUOTE_STRING_MODE,{begin:/b?"/,illegal:null}),{className:"symbol",begin:/'[a-zA-Z_][a-zA-Z0-9_]*(?!')/},{scope:"string",variants:[{begin:/b?r(#*)"(.|\n)*?"\1(?!#)/},
{begin:/b?'/,end:/'/,contains:[{scope:"char.escape",match:/\\('|\w|x\w{2}|u\w{4}|U\w{8})/}]}]},{className:"number",variants:[{begin:"\\b0b([01_]+)"+a},{begin:"\\\
b0o([0-7_]+)"+a},{begin:"\\b0x([A-Fa-f0-9_]+)"+a},{begin:"\\b(\\d[\\d_]*(\\.[0-9_]+)?([eE][+-]?[0-9_]+)?)"+a}],relevance:0},{begin:[/fn/,/\s+/,r],className:{1:"\
keyword",3:"title.function"}},{className:"meta",begin:"#!?\\[",end:"\\]",contains:[{className:"string",begin:/"/,end:/"/,contains:[e.BACKSLASH_ESCAPE]}]},{begin:[
/let/,/\s+/,/(?:mut\s+)?/,r],className:{1:"keyword",3:"keyword",4:"variable"}},{begin:[/for/,/\s+/,r,/\s+/,/in/],className:{1:"keyword",3:"variable",5:"keyword"}},
{begin:[/type/,/\s+/,r],className:{1:"keyword",3:"title.class"}},{begin:[/(?:trait|enum|struct|union|impl|for)/,/\s+/,r],className:{1:"keyword",3:"title.class"}},
{begin:e.IDENT_RE+"::",keywords:{keyword:"Self",built_in:d,type:p}},{className:"punctuation",begin:"->"},o]}}var rc=e=>({IMPORTANT:{scope:"meta",begin:"!important"},BLOCK_COMMENT:e.C_BLOCK_COMMENT_MODE,HEXCOLOR:{scope:"number",begin:/#(([0-9a-fA-F]{3,4})|(([0-9a-fA-F]{2}){3,4}))\b/},
UNICODE_RANGE:{scope:"number",begin:/\b[Uu]\+[0-9A-Fa-f][0-9A-Fa-f?]{0,4}(-[0-9A-Fa-f][0-9A-Fa-f]{0,4})?/},FUNCTION_DISPATCH:{className:"built_in",begin:/[\w-]+(?=\()/},
ATTRIBUTE_SELECTOR_MODE:{scope:"selector-attr",begin:/\[/,end:/\]/,illegal:"$",contains:[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE]},CSS_NUMBER_MODE:{scope:"number",
begin:e.NUMBER_RE+"(%|em|ex|ch|rem|vw|vh|vmin|vmax|cm|mm|in|pt|pc|px|deg|grad|rad|turn|s|ms|Hz|kHz|dpi|dpcm|dppx)?",relevance:0},CSS_VARIABLE:{className:"attr",
begin:/--[A-Za-z_][A-Za-z0-9_-]*/}}),ic=["a","abbr","address","article","aside","audio","b","blockquote","body","button","canvas","caption","cite","code","dd","\
del","details","dfn","div","dl","dt","em","fieldset","figcaption","figure","footer","form","h1","h2","h3","h4","h5","h6","header","hgroup","html","i","iframe","\
img","input","ins","kbd","label","legend","li","main","mark","menu","nav","object","ol","optgroup","option","p","picture","q","quote","samp","section","select",
"source","span","strong","summary","sup","table","tbody","td","textarea","tfoot","th","thead","time","tr","ul","var","video"],ac=["defs","g","marker","mask","pa\
ttern","svg","switch","symbol","feBlend","feColorMatrix","feComponentTransfer","feComposite","feConvolveMatrix","feDiffuseLighting","feDisplacementMap","feFlood",
"feGaussianBlur","feImage","feMerge","feMorphology","feOffset","feSpecularLighting","feTile","feTurbulence","linearGradient","radialGradient","stop","circle","e\
llipse","image","line","path","polygon","polyline","rect","text","use","textPath","tspan","foreignObject","clipPath"],oc=[...ic,...ac],sc=["any-hover","any-poin\
ter","aspect-ratio","color","color-gamut","color-index","device-aspect-ratio","device-height","device-width","display-mode","forced-colors","grid","height","hov\
er","inverted-colors","monochrome","orientation","overflow-block","overflow-inline","pointer","prefers-color-scheme","prefers-contrast","prefers-reduced-motion",
"prefers-reduced-transparency","resolution","scan","scripting","update","width","min-width","max-width","min-height","max-height"].sort().reverse(),lc=["active",
"any-link","blank","checked","current","default","defined","dir","disabled","drop","empty","enabled","first","first-child","first-of-type","fullscreen","future",
"focus","focus-visible","focus-within","has","host","host-context","hover","indeterminate","in-range","invalid","is","lang","last-child","last-of-type","left","\
link","local-link","not","nth-child","nth-col","nth-last-child","nth-last-col","nth-last-of-type","nth-of-type","only-child","only-of-type","optional","out-of-r\
ange","past","placeholder-shown","read-only","read-write","required","right","root","scope","target","target-within","user-invalid","valid","visited","where"].sort().
reverse(),cc=["after","backdrop","before","cue","cue-region","first-letter","first-line","grammar-error","marker","part","placeholder","selection","slotted","sp\
elling-error"].sort().reverse(),uc=["accent-color","align-content","align-items","align-self","alignment-baseline","all","anchor-name","animation","animation-co\
mposition","animation-delay","animation-direction","animation-duration","animation-fill-mode","animation-iteration-count","animation-name","animation-play-state",
"animation-range","animation-range-end","animation-range-start","animation-timeline","animation-timing-function","appearance","aspect-ratio","backdrop-filter","\
backface-visibility","background","background-attachment","background-blend-mode","background-clip","background-color","background-image","background-origin","b\
ackground-position","background-position-x","background-position-y","background-repeat","background-size","baseline-shift","block-size","border","border-block",
"border-block-color","border-block-end","border-block-end-color","border-block-end-style","border-block-end-width","border-block-start","border-block-start-colo\
r","border-block-start-style","border-block-start-width","border-block-style","border-block-width","border-bottom","border-bottom-color","border-bottom-left-rad\
ius","border-bottom-right-radius","border-bottom-style","border-bottom-width","border-collapse","border-color","border-end-end-radius","border-end-start-radius",
"border-image","border-image-outset","border-image-repeat","border-image-slice","border-image-source","border-image-width","border-inline","border-inline-color",
"border-inline-end","border-inline-end-color","border-inline-end-style","border-inline-end-width","border-inline-start","border-inline-start-color","border-inli\
ne-start-style","border-inline-start-width","border-inline-style","border-inline-width","border-left","border-left-color","border-left-style","border-left-width",
"border-radius","border-right","border-right-color","border-right-style","border-right-width","border-spacing","border-start-end-radius","border-start-start-rad\
ius","border-style","border-top","border-top-color","border-top-left-radius","border-top-right-radius","border-top-style","border-top-width","border-width","bot\
tom","box-align","box-decoration-break","box-direction","box-flex","box-flex-group","box-lines","box-ordinal-group","box-orient","box-pack","box-shadow","box-si\
zing","break-after","break-before","break-inside","caption-side","caret-color","clear","clip","clip-path","clip-rule","color","color-interpolation","color-inter\
polation-filters","color-profile","color-rendering","color-scheme","column-count","column-fill","column-gap","column-rule","column-rule-color","column-rule-styl\
e","column-rule-width","column-span","column-width","columns","contain","contain-intrinsic-block-size","contain-intrinsic-height","contain-intrinsic-inline-size",
"contain-intrinsic-size","contain-intrinsic-width","container","container-name","container-type","content","content-visibility","counter-increment","counter-res\
et","counter-set","cue","cue-after","cue-before","cursor","cx","cy","direction","display","dominant-baseline","empty-cells","enable-background","field-sizing","\
fill","fill-opacity","fill-rule","filter","flex","flex-basis","flex-direction","flex-flow","flex-grow","flex-shrink","flex-wrap","float","flood-color","flood-op\
acity","flow","font","font-display","font-family","font-feature-settings","font-kerning","font-language-override","font-optical-sizing","font-palette","font-siz\
e","font-size-adjust","font-smooth","font-smoothing","font-stretch","font-style","font-synthesis","font-synthesis-position","font-synthesis-small-caps","font-sy\
nthesis-style","font-synthesis-weight","font-variant","font-variant-alternates","font-variant-caps","font-variant-east-asian","font-variant-emoji","font-variant\
-ligatures","font-variant-numeric","font-variant-position","font-variation-settings","font-weight","forced-color-adjust","gap","glyph-orientation-horizontal","g\
lyph-orientation-vertical","grid","grid-area","grid-auto-columns","grid-auto-flow","grid-auto-rows","grid-column","grid-column-end","grid-column-start","grid-ga\
p","grid-row","grid-row-end","grid-row-start","grid-template","grid-template-areas","grid-template-columns","grid-template-rows","hanging-punctuation","height",
"hyphenate-character","hyphenate-limit-chars","hyphens","icon","image-orientation","image-rendering","image-resolution","ime-mode","initial-letter","initial-let\
ter-align","inline-size","inset","inset-area","inset-block","inset-block-end","inset-block-start","inset-inline","inset-inline-end","inset-inline-start","isolat\
ion","justify-content","justify-items","justify-self","kerning","left","letter-spacing","lighting-color","line-break","line-height","line-height-step","list-sty\
le","list-style-image","list-style-position","list-style-type","margin","margin-block","margin-block-end","margin-block-start","margin-bottom","margin-inline","\
margin-inline-end","margin-inline-start","margin-left","margin-right","margin-top","margin-trim","marker","marker-end","marker-mid","marker-start","marks","mask",
"mask-border","mask-border-mode","mask-border-outset","mask-border-repeat","mask-border-slice","mask-border-source","mask-border-width","mask-clip","mask-compos\
ite","mask-image","mask-mode","mask-origin","mask-position","mask-repeat","mask-size","mask-type","masonry-auto-flow","math-depth","math-shift","math-style","ma\
x-block-size","max-height","max-inline-size","max-width","min-block-size","min-height","min-inline-size","min-width","mix-blend-mode","nav-down","nav-index","na\
v-left","nav-right","nav-up","none","normal","object-fit","object-position","offset","offset-anchor","offset-distance","offset-path","offset-position","offset-r\
otate","opacity","order","orphans","outline","outline-color","outline-offset","outline-style","outline-width","overflow","overflow-anchor","overflow-block","ove\
rflow-clip-margin","overflow-inline","overflow-wrap","overflow-x","overflow-y","overlay","overscroll-behavior","overscroll-behavior-block","overscroll-behavior-\
inline","overscroll-behavior-x","overscroll-behavior-y","padding","padding-block","padding-block-end","padding-block-start","padding-bottom","padding-inline","p\
adding-inline-end","padding-inline-start","padding-left","padding-right","padding-top","page","page-break-after","page-break-before","page-break-inside","paint-\
order","pause","pause-after","pause-before","perspective","perspective-origin","place-content","place-items","place-self","pointer-events","position","position-\
anchor","position-visibility","print-color-adjust","quotes","r","resize","rest","rest-after","rest-before","right","rotate","row-gap","ruby-align","ruby-positio\
n","scale","scroll-behavior","scroll-margin","scroll-margin-block","scroll-margin-block-end","scroll-margin-block-start","scroll-margin-bottom","scroll-margin-i\
nline","scroll-margin-inline-end","scroll-margin-inline-start","scroll-margin-left","scroll-margin-right","scroll-margin-top","scroll-padding","scroll-padding-b\
lock","scroll-padding-block-end","scroll-padding-block-start","scroll-padding-bottom","scroll-padding-inline","scroll-padding-inline-end","scroll-padding-inline\
-start","scroll-padding-left","scroll-padding-right","scroll-padding-top","scroll-snap-align","scroll-snap-stop","scroll-snap-type","scroll-timeline","scroll-ti\
meline-axis","scroll-timeline-name","scrollbar-color","scrollbar-gutter","scrollbar-width","shape-image-threshold","shape-margin","shape-outside","shape-renderi\
ng","speak","speak-as","src","stop-color","stop-opacity","stroke","stroke-dasharray","stroke-dashoffset","stroke-linecap","stroke-linejoin","stroke-miterlimit",
"stroke-opacity","stroke-width","tab-size","table-layout","text-align","text-align-all","text-align-last","text-anchor","text-combine-upright","text-decoration",
"text-decoration-color","text-decoration-line","text-decoration-skip","text-decoration-skip-ink","text-decoration-style","text-decoration-thickness","text-empha\
sis","text-emphasis-color","text-emphasis-position","text-emphasis-style","text-indent","text-justify","text-orientation","text-overflow","text-rendering","text\
-shadow","text-size-adjust","text-transform","text-underline-offset","text-underline-position","text-wrap","text-wrap-mode","text-wrap-style","timeline-scope","\
top","touch-action","transform","transform-box","transform-origin","transform-style","transition","transition-behavior","transition-delay","transition-duration",
"transition-property","transition-timing-function","translate","unicode-bidi","unicode-range","user-modify","user-select","vector-effect","vertical-align","view\
-timeline","view-timeline-axis","view-timeline-inset","view-timeline-name","view-transition-name","visibility","voice-balance","voice-duration","voice-family","\
voice-pitch","voice-range","voice-rate","voice-stress","voice-volume","white-space","white-space-collapse","widows","width","will-change","word-break","word-spa\
cing","word-wrap","writing-mode","x","y","z-index","zoom"].sort().reverse();function _a(e){let t=rc(e),n=cc,r=lc,i="@[a-z-]+",o="and or not only",l={className:"\
variable",begin:"(\\$"+"[a-zA-Z-][a-zA-Z0-9_-]*"+")\\b",relevance:0};return{name:"SCSS",case_insensitive:!0,illegal:"[=/|']",contains:[e.C_LINE_COMMENT_MODE,e.C_BLOCK_COMMENT_MODE,
t.CSS_NUMBER_MODE,{className:"selector-id",begin:"#[A-Za-z0-9_-]+",relevance:0},{className:"selector-class",begin:"\\.[A-Za-z0-9_-]+",relevance:0},t.ATTRIBUTE_SELECTOR_MODE,
{className:"selector-tag",begin:"\\b("+oc.join("|")+")\\b",relevance:0},{className:"selector-pseudo",begin:":("+r.join("|")+")"},{className:"selector-pseudo",begin:"\
:(:)?("+n.join("|")+")"},l,{begin:/\(/,end:/\)/,contains:[t.CSS_NUMBER_MODE]},t.CSS_VARIABLE,{className:"attribute",begin:"\\b("+uc.join("|")+")\\b"},{begin:"\\b\
(whitespace|wait|w-resize|visible|vertical-text|vertical-ideographic|uppercase|upper-roman|upper-alpha|underline|transparent|top|thin|thick|text|text-top|text-b\
ottom|tb-rl|table-header-group|table-footer-group|sw-resize|super|strict|static|square|solid|small-caps|separate|se-resize|scroll|s-resize|rtl|row-resize|ridge|\
right|repeat|repeat-y|repeat-x|relative|progress|pointer|overline|outside|outset|oblique|nowrap|not-allowed|normal|none|nw-resize|no-repeat|no-drop|newspaper|ne\
-resize|n-resize|move|middle|medium|ltr|lr-tb|lowercase|lower-roman|lower-alpha|loose|list-item|line|line-through|line-edge|lighter|left|keep-all|justify|italic\
|inter-word|inter-ideograph|inside|inset|inline|inline-block|inherit|inactive|ideograph-space|ideograph-parenthesis|ideograph-numeric|ideograph-alpha|horizontal\
|hidden|help|hand|groove|fixed|ellipsis|e-resize|double|dotted|distribute|distribute-space|distribute-letter|distribute-all-lines|disc|disabled|default|decimal|\
dashed|crosshair|collapse|col-resize|circle|char|center|capitalize|break-word|break-all|bottom|both|bolder|bold|block|bidi-override|below|baseline|auto|always|a\
ll-scroll|absolute|table|table-cell)\\b"},{begin:/:/,end:/[;}{]/,relevance:0,contains:[t.BLOCK_COMMENT,l,t.HEXCOLOR,t.CSS_NUMBER_MODE,t.UNICODE_RANGE,e.QUOTE_STRING_MODE,
e.APOS_STRING_MODE,t.IMPORTANT,t.FUNCTION_DISPATCH]},{begin:"@(page|font-face)",keywords:{$pattern:i,keyword:"@page @font-face"}},{begin:"@",end:"[{;]",returnBegin:!0,
keywords:{$pattern:/[a-z-]+/,keyword:o,attribute:sc.join(" ")},contains:[{begin:i,className:"keyword"},{begin:/[a-z-]+(?=:)/,className:"attribute"},l,e.QUOTE_STRING_MODE,
e.APOS_STRING_MODE,t.HEXCOLOR,t.CSS_NUMBER_MODE]},t.FUNCTION_DISPATCH]}}function Ea(e){return{name:"Shell Session",aliases:["console","shellsession"],contains:[{className:"meta.prompt",begin:/^\s{0,3}[/~\w\d[\]()@-]*[>%$#][ ]?/,starts:{
end:/[^\\](?=\s*$)/,subLanguage:"bash"}}]}}function ka(e){let t=e.regex,n=e.COMMENT("--","$"),r={scope:"string",variants:[{begin:/'/,end:/'/,contains:[{match:/''/}]}]},i={begin:/"/,end:/"/,contains:[{match:/""/}]},
o=["true","false","unknown"],a=["double precision","large object","with timezone","without timezone"],l=["bigint","binary","blob","boolean","char","character","\
clob","date","dec","decfloat","decimal","float","int","integer","interval","nchar","nclob","national","numeric","real","row","smallint","time","timestamp","varc\
har","varying","varbinary"],u=["add","asc","collation","desc","final","first","last","view"],d=["abs","acos","all","allocate","alter","and","any","are","array",
"array_agg","array_max_cardinality","as","asensitive","asin","asymmetric","at","atan","atomic","authorization","avg","begin","begin_frame","begin_partition","be\
tween","bigint","binary","blob","boolean","both","by","call","called","cardinality","cascaded","case","cast","ceil","ceiling","char","char_length","character","\
character_length","check","classifier","clob","close","coalesce","collate","collect","column","commit","condition","connect","constraint","contains","convert","\
copy","corr","corresponding","cos","cosh","count","covar_pop","covar_samp","create","cross","cube","cume_dist","current","current_catalog","current_date","curre\
nt_default_transform_group","current_path","current_role","current_row","current_schema","current_time","current_timestamp","current_path","current_role","curre\
nt_transform_group_for_type","current_user","cursor","cycle","date","day","deallocate","dec","decimal","decfloat","declare","default","define","delete","dense_r\
ank","deref","describe","deterministic","disconnect","distinct","double","drop","dynamic","each","element","else","empty","end","end_frame","end_partition","end\
-exec","equals","escape","every","except","exec","execute","exists","exp","external","extract","false","fetch","filter","first_value","float","floor","for","for\
eign","frame_row","free","from","full","function","fusion","get","global","grant","group","grouping","groups","having","hold","hour","identity","in","indicator",
"initial","inner","inout","insensitive","insert","int","integer","intersect","intersection","interval","into","is","join","json_array","json_arrayagg","json_exi\
sts","json_object","json_objectagg","json_query","json_table","json_table_primitive","json_value","lag","language","large","last_value","lateral","lead","leadin\
g","left","like","like_regex","listagg","ln","local","localtime","localtimestamp","log","log10","lower","match","match_number","match_recognize","matches","max",
"member","merge","method","min","minute","mod","modifies","module","month","multiset","national","natural","nchar","nclob","new","no","none","normalize","not","\
nth_value","ntile","null","nullif","numeric","octet_length","occurrences_regex","of","offset","old","omit","on","one","only","open","or","order","out","outer","\
over","overlaps","overlay","parameter","partition","pattern","per","percent","percent_rank","percentile_cont","percentile_disc","period","portion","position","p\
osition_regex","power","precedes","precision","prepare","primary","procedure","ptf","range","rank","reads","real","recursive","ref","references","referencing","\
regr_avgx","regr_avgy","regr_count","regr_intercept","regr_r2","regr_slope","regr_sxx","regr_sxy","regr_syy","release","result","return","returns","revoke","rig\
ht","rollback","rollup","row","row_number","rows","running","savepoint","scope","scroll","search","second","seek","select","sensitive","session_user","set","sho\
w","similar","sin","sinh","skip","smallint","some","specific","specifictype","sql","sqlexception","sqlstate","sqlwarning","sqrt","start","static","stddev_pop","\
stddev_samp","submultiset","subset","substring","substring_regex","succeeds","sum","symmetric","system","system_time","system_user","table","tablesample","tan",
"tanh","then","time","timestamp","timezone_hour","timezone_minute","to","trailing","translate","translate_regex","translation","treat","trigger","trim","trim_ar\
ray","true","truncate","uescape","union","unique","unknown","unnest","update","upper","user","using","value","values","value_of","var_pop","var_samp","varbinary",
"varchar","varying","versioning","when","whenever","where","width_bucket","window","with","within","without","year"],p=["abs","acos","array_agg","asin","atan","\
avg","cast","ceil","ceiling","coalesce","corr","cos","cosh","count","covar_pop","covar_samp","cume_dist","dense_rank","deref","element","exp","extract","first_v\
alue","floor","json_array","json_arrayagg","json_exists","json_object","json_objectagg","json_query","json_table","json_table_primitive","json_value","lag","las\
t_value","lead","listagg","ln","log","log10","lower","max","min","mod","nth_value","ntile","nullif","percent_rank","percentile_cont","percentile_disc","position",
"position_regex","power","rank","regr_avgx","regr_avgy","regr_count","regr_intercept","regr_r2","regr_slope","regr_sxx","regr_sxy","regr_syy","row_number","sin",
"sinh","sqrt","stddev_pop","stddev_samp","substring","substring_regex","sum","tan","tanh","translate","translate_regex","treat","trim","trim_array","unnest","up\
per","value_of","var_pop","var_samp","width_bucket"],m=["current_catalog","current_date","current_default_transform_group","current_path","current_role","curren\
t_schema","current_transform_group_for_type","current_user","session_user","system_time","system_user","current_time","localtime","current_timestamp","localtime\
stamp"],h=["create table","insert into","primary key","foreign key","not null","alter table","add constraint","grouping sets","on overflow","character set","res\
pect nulls","ignore nulls","nulls first","nulls last","depth first","breadth first"],f=p,_=[...d,...u].filter(z=>!p.includes(z)),C={scope:"variable",match:/@[a-z0-9][a-z0-9_]*/},
T={scope:"operator",match:/[-+*/=%^~]|&&?|\|\|?|!=?|<(?:=>?|<|>)?|>[>=]?/,relevance:0},E={match:t.concat(/\b/,t.either(...f),/\s*\(/),relevance:0,keywords:{built_in:f}};
function v(z){return t.concat(/\b/,t.either(...z.map(A=>A.replace(/\s+/,"\\s+"))),/\b/)}let D={scope:"keyword",match:v(h),relevance:0};function q(z,{exceptions:A,
when:Z}={}){let Y=Z;return A=A||[],z.map(X=>X.match(/\|\d+$/)||A.includes(X)?X:Y(X)?`${X}|0`:X)}return{name:"SQL",case_insensitive:!0,illegal:/[{}]|<\//,keywords:{
$pattern:/\b[\w\.]+/,keyword:q(_,{when:z=>z.length<3}),literal:o,type:l,built_in:m},contains:[{scope:"type",match:v(a)},D,E,C,r,i,e.C_NUMBER_MODE,e.C_BLOCK_COMMENT_MODE,
n,T]}}function Ta(e){return e?typeof e=="string"?e:e.source:null}function en(e){return ge("(?=",e,")")}function ge(...e){return e.map(n=>Ta(n)).join("")}function dc(e){
let t=e[e.length-1];return typeof t=="object"&&t.constructor===Object?(e.splice(e.length-1,1),t):{}}function qe(...e){return"("+(dc(e).capture?"":"?:")+e.map(r=>Ta(
r)).join("|")+")"}var fr=e=>ge(/\b/,e,/\w$/.test(e)?/\b/:/\B/),pc=["Protocol","Type"].map(fr),Sa=["init","self"].map(fr),mc=["Any","Self"],mr=["actor","any","as\
sociatedtype","async","await",/as\?/,/as!/,"as","borrowing","break","case","catch","class","consume","consuming","continue","convenience","copy","default","defe\
r","deinit","didSet","distributed","do","dynamic","each","else","enum","extension","fallthrough",/fileprivate\(set\)/,"fileprivate","final","for","func","get","\
guard","if","import","indirect","infix",/init\?/,/init!/,"inout",/internal\(set\)/,"internal","in","is","isolated","nonisolated","lazy","let","macro","mutating",
"nonmutating",/open\(set\)/,"open","operator","optional","override","package","postfix","precedencegroup","prefix",/private\(set\)/,"private","protocol",/public\(set\)/,
"public","repeat","required","rethrows","return","set","some","static","struct","subscript","super","switch","throws","throw",/try\?/,/try!/,"try","typealias",/unowned\(safe\)/,
/unowned\(unsafe\)/,"unowned","var","weak","where","while","willSet"],va=["false","nil","true"],hc=["assignment","associativity","higherThan","left","lowerThan",
"none","right"],fc=["#colorLiteral","#column","#dsohandle","#else","#elseif","#endif","#error","#file","#fileID","#fileLiteral","#filePath","#function","#if","#\
imageLiteral","#keyPath","#line","#selector","#sourceLocation","#warning"],Aa=["abs","all","any","assert","assertionFailure","debugPrint","dump","fatalError","g\
etVaList","isKnownUniquelyReferenced","max","min","numericCast","pointwiseMax","pointwiseMin","precondition","preconditionFailure","print","readLine","repeatEle\
ment","sequence","stride","swap","swift_unboxFromSwiftValueWithType","transcode","type","unsafeBitCast","unsafeDowncast","withExtendedLifetime","withUnsafeMutab\
lePointer","withUnsafePointer","withVaList","withoutActuallyEscaping","zip"],Na=qe(/[/=\-+!*%<>&|^~?]/,/[\u00A1-\u00A7]/,/[\u00A9\u00AB]/,/[\u00AC\u00AE]/,/[\u00B0\u00B1]/,
/[\u00B6\u00BB\u00BF\u00D7\u00F7]/,/[\u2016-\u2017]/,/[\u2020-\u2027]/,/[\u2030-\u203E]/,/[\u2041-\u2053]/,/[\u2055-\u205E]/,/[\u2190-\u23FF]/,/[\u2500-\u2775]/,
/[\u2794-\u2BFF]/,/[\u2E00-\u2E7F]/,/[\u3001-\u3003]/,/[\u3008-\u3020]/,/[\u3030]/),Ca=qe(Na,/[\u0300-\u036F]/,/[\u1DC0-\u1DFF]/,/[\u20D0-\u20FF]/,/[\uFE00-\uFE0F]/,
/[\uFE20-\uFE2F]/),hr=ge(Na,Ca,"*"),Oa=qe(/[a-zA-Z_]/,/[\u00A8\u00AA\u00AD\u00AF\u00B2-\u00B5\u00B7-\u00BA]/,/[\u00BC-\u00BE\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u00FF]/,
/[\u0100-\u02FF\u0370-\u167F\u1681-\u180D\u180F-\u1DBF]/,/[\u1E00-\u1FFF]/,/[\u200B-\u200D\u202A-\u202E\u203F-\u2040\u2054\u2060-\u206F]/,/[\u2070-\u20CF\u2100-\u218F\u2460-\u24FF\u2776-\u2793]/,
/[\u2C00-\u2DFF\u2E80-\u2FFF]/,/[\u3004-\u3007\u3021-\u302F\u3031-\u303F\u3040-\uD7FF]/,/[\uF900-\uFD3D\uFD40-\uFDCF\uFDF0-\uFE1F\uFE30-\uFE44]/,/[\uFE47-\uFEFE\uFF00-\uFFFD]/),
An=qe(Oa,/\d/,/[\u0300-\u036F\u1DC0-\u1DFF\u20D0-\u20FF\uFE20-\uFE2F]/),et=ge(Oa,An,"*"),vn=ge(/[A-Z]/,An,"*"),gc=["attached","autoclosure",ge(/convention\(/,qe(
"swift","block","c"),/\)/),"discardableResult","dynamicCallable","dynamicMemberLookup","escaping","freestanding","frozen","GKInspectable","IBAction","IBDesignab\
le","IBInspectable","IBOutlet","IBSegueAction","inlinable","main","nonobjc","NSApplicationMain","NSCopying","NSManaged",ge(/objc\(/,et,/\)/),"objc","objcMembers",
"propertyWrapper","requires_stored_property_inits","resultBuilder","Sendable","testable","UIApplicationMain","unchecked","unknown","usableFromInline","warn_unqu\
alified_access"],bc=["iOS","iOSApplicationExtension","macOS","macOSApplicationExtension","macCatalyst","macCatalystApplicationExtension","watchOS","watchOSAppli\
cationExtension","tvOS","tvOSApplicationExtension","swift"];function Ia(e){let t={match:/\s+/,relevance:0},n=e.COMMENT("/\\*","\\*/",{contains:["self"]}),r=[e.C_LINE_COMMENT_MODE,
n],i={match:[/\./,qe(...pc,...Sa)],className:{2:"keyword"}},o={match:ge(/\./,qe(...mr)),relevance:0},a=mr.filter(me=>typeof me=="string").concat(["_|0"]),l=mr.filter(
me=>typeof me!="string").concat(mc).map(fr),u={variants:[{className:"keyword",match:qe(...l,...Sa)}]},d={$pattern:qe(/\b\w+/,/#\w+/),keyword:a.concat(fc),literal:va},
p=[i,o,u],m={match:ge(/\./,qe(...Aa)),relevance:0},h={className:"built_in",match:ge(/\b/,qe(...Aa),/(?=\()/)},f=[m,h],_={match:/->/,relevance:0},C={className:"o\
perator",relevance:0,variants:[{match:hr},{match:`\\.(\\.|${Ca})+`}]},T=[_,C],E="([0-9]_*)+",v="([0-9a-fA-F]_*)+",D={className:"number",relevance:0,variants:[{match:`\
\\b(${E})(\\.(${E}))?([eE][+-]?(${E}))?\\b`},{match:`\\b0x(${v})(\\.(${v}))?([pP][+-]?(${E}))?\\b`},{match:/\b0o([0-7]_*)+\b/},{match:/\b0b([01]_*)+\b/}]},q=(me="")=>({
className:"subst",variants:[{match:ge(/\\/,me,/[0\\tnr"']/)},{match:ge(/\\/,me,/u\{[0-9a-fA-F]{1,8}\}/)}]}),z=(me="")=>({className:"subst",match:ge(/\\/,me,/[\t ]*(?:[\r\n]|\r\n)/)}),
A=(me="")=>({className:"subst",label:"interpol",begin:ge(/\\/,me,/\(/),end:/\)/}),Z=(me="")=>({begin:ge(me,/"""/),end:ge(/"""/,me),contains:[q(me),z(me),A(me)]}),
Y=(me="")=>({begin:ge(me,/"/),end:ge(/"/,me),contains:[q(me),A(me)]}),X={className:"string",variants:[Z(),Z("#"),Z("##"),Z("###"),Y(),Y("#"),Y("##"),Y("###")]},
O=[e.BACKSLASH_ESCAPE,{begin:/\[/,end:/\]/,relevance:0,contains:[e.BACKSLASH_ESCAPE]}],oe={begin:/\/[^\s](?=[^/\n]*\/)/,end:/\//,contains:O},ie=me=>{let Ye=ge(me,
/\//),re=ge(/\//,me);return{begin:Ye,end:re,contains:[...O,{scope:"comment",begin:`#(?!.*${re})`,end:/$/}]}},W={scope:"regexp",variants:[ie("###"),ie("##"),ie("\
#"),oe]},j={match:ge(/`/,et,/`/)},Q={className:"variable",match:/\$\d+/},R={className:"variable",match:`\\$${An}+`},P=[j,Q,R],G={match:/(@|#(un)?)available/,scope:"\
keyword",starts:{contains:[{begin:/\(/,end:/\)/,keywords:bc,contains:[...T,D,X]}]}},ne={scope:"keyword",match:ge(/@/,qe(...gc),en(qe(/\(/,/\s+/)))},y={scope:"me\
ta",match:ge(/@/,et)},le=[G,ne,y],de={match:en(/\b[A-Z]/),relevance:0,contains:[{className:"type",match:ge(/(AV|CA|CF|CG|CI|CL|CM|CN|CT|MK|MP|MTK|MTL|NS|SCN|SK|UI|WK|XC)/,
An,"+")},{className:"type",match:vn,relevance:0},{match:/[?!]+/,relevance:0},{match:/\.\.\./,relevance:0},{match:ge(/\s+&\s+/,en(vn)),relevance:0}]},w={begin:/</,
end:/>/,keywords:d,contains:[...r,...p,...le,_,de]};de.contains.push(w);let he={match:ge(et,/\s*:/),keywords:"_|0",relevance:0},ve={begin:/\(/,end:/\)/,relevance:0,
keywords:d,contains:["self",he,...r,W,...p,...f,...T,D,X,...P,...le,de]},Ve={begin:/</,end:/>/,keywords:"repeat each",contains:[...r,de]},ot={begin:qe(en(ge(et,
/\s*:/)),en(ge(et,/\s+/,et,/\s*:/))),end:/:/,relevance:0,contains:[{className:"keyword",match:/\b_\b/},{className:"params",match:et}]},_e={begin:/\(/,end:/\)/,keywords:d,
contains:[ot,...r,...p,...T,D,X,...le,de,ve],endsParent:!0,illegal:/["']/},st={match:[/(func|macro)/,/\s+/,qe(j.match,et,hr)],className:{1:"keyword",3:"title.fu\
nction"},contains:[Ve,_e,t],illegal:[/\[/,/%/]},Ue={match:[/\b(?:subscript|init[?!]?)/,/\s*(?=[<(])/],className:{1:"keyword"},contains:[Ve,_e,t],illegal:/\[|%/},
Qe={match:[/operator/,/\s+/,hr],className:{1:"keyword",3:"title"}},Ze={begin:[/precedencegroup/,/\s+/,vn],className:{1:"keyword",3:"title"},contains:[de],keywords:[
...hc,...va],end:/}/},je={match:[/class\b/,/\s+/,/func\b/,/\s+/,/\b[A-Za-z_][A-Za-z0-9_]*\b/],scope:{1:"keyword",3:"keyword",5:"title.function"}},Rt={match:[/class\b/,
/\s+/,/var\b/],scope:{1:"keyword",3:"keyword"}},Pe={begin:[/(struct|protocol|class|extension|enum|actor)/,/\s+/,et,/\s*/],beginScope:{1:"keyword",3:"title.class"},
keywords:d,contains:[Ve,...p,{begin:/:/,end:/\{/,keywords:d,contains:[{scope:"title.class.inherited",match:vn},...p],relevance:0}]};for(let me of X.variants){let Ye=me.
contains.find(Dt=>Dt.label==="interpol");Ye.keywords=d;let re=[...p,...f,...T,D,X,...P];Ye.contains=[...re,{begin:/\(/,end:/\)/,contains:["self",...re]}]}return{
name:"Swift",keywords:d,contains:[...r,st,Ue,je,Rt,Pe,Qe,Ze,{beginKeywords:"import",end:/$/,contains:[...r],relevance:0},W,...p,...f,...T,D,X,...P,...le,de,ve]}}var Tn="[A-Za-z$_][0-9A-Za-z$_]*",Ra=["as","in","of","if","for","while","finally","var","new","function","do","return","void","else","break","catch","instanceof",
"with","throw","case","default","try","switch","continue","typeof","delete","let","yield","const","class","debugger","async","await","static","import","from","e\
xport","extends","using"],Da=["true","false","null","undefined","NaN","Infinity"],Ma=["Object","Function","Boolean","Symbol","Math","Date","Number","BigInt","St\
ring","RegExp","Array","Float32Array","Float64Array","Int8Array","Uint8Array","Uint8ClampedArray","Int16Array","Int32Array","Uint16Array","Uint32Array","BigInt6\
4Array","BigUint64Array","Set","Map","WeakSet","WeakMap","ArrayBuffer","SharedArrayBuffer","Atomics","DataView","JSON","Promise","Generator","GeneratorFunction",
"AsyncFunction","Reflect","Proxy","Intl","WebAssembly"],La=["Error","EvalError","InternalError","RangeError","ReferenceError","SyntaxError","TypeError","URIErro\
r"],Ba=["setInterval","setTimeout","clearInterval","clearTimeout","require","exports","eval","isFinite","isNaN","parseFloat","parseInt","decodeURI","decodeURICo\
mponent","encodeURI","encodeURIComponent","escape","unescape"],qa=["arguments","this","super","console","window","document","localStorage","sessionStorage","mod\
ule","global"],Fa=[].concat(Ba,Ma,La);function xc(e){let t=e.regex,n=(G,{after:ne})=>{let y="</"+G[0].slice(1);return G.input.indexOf(y,ne)!==-1},r=Tn,i={begin:"\
<>",end:"</>"},o=/<[A-Za-z0-9\\._:-]+\s*\/>/,a={begin:/<[A-Za-z0-9\\._:-]+/,end:/\/[A-Za-z0-9\\._:-]+>|\/>/,isTrulyOpeningTag:(G,ne)=>{let y=G[0].length+G.index,
le=G.input[y];if(le==="<"||le===","){ne.ignoreMatch();return}le===">"&&(n(G,{after:y})||ne.ignoreMatch());let de,w=G.input.substring(y);if(de=w.match(/^\s*=/)){
ne.ignoreMatch();return}if((de=w.match(/^\s+extends\s+/))&&de.index===0){ne.ignoreMatch();return}}},l={$pattern:Tn,keyword:Ra,literal:Da,built_in:Fa,"variable.l\
anguage":qa},u="[0-9](_?[0-9])*",d=`\\.(${u})`,p="0|[1-9](_?[0-9])*|0[0-7]*[89][0-9]*",m={className:"number",variants:[{begin:`(\\b(${p})((${d})|\\.)?|(${d}))[e\
E][+-]?(${u})\\b`},{begin:`\\b(${p})\\b((${d})\\b|\\.)?|(${d})\\b`},{begin:"\\b(0|[1-9](_?[0-9])*)n\\b"},{begin:"\\b0[xX][0-9a-fA-F](_?[0-9a-fA-F])*n?\\b"},{begin:"\
\\b0[bB][0-1](_?[0-1])*n?\\b"},{begin:"\\b0[oO][0-7](_?[0-7])*n?\\b"},{begin:"\\b0[0-7]+n?\\b"}],relevance:0},h={className:"subst",begin:"\\$\\{",end:"\\}",keywords:l,
contains:[]},f={begin:".?html`",end:"",starts:{end:"`",returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"xml"}},_={begin:".?css`",end:"",starts:{end:"`",
returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"css"}},C={begin:".?gql`",end:"",starts:{end:"`",returnEnd:!1,contains:[e.BACKSLASH_ESCAPE,h],subLanguage:"\
graphql"}},T={className:"string",begin:"`",end:"`",contains:[e.BACKSLASH_ESCAPE,h]},v={className:"comment",variants:[e.COMMENT(/\/\*\*(?!\/)/,"\\*/",{relevance:0,
contains:[{begin:"(?=@[A-Za-z]+)",relevance:0,contains:[{className:"doctag",begin:"@[A-Za-z]+"},{className:"type",begin:"\\{",end:"\\}",excludeEnd:!0,excludeBegin:!0,
relevance:0},{className:"variable",begin:r+"(?=\\s*(-)|$)",endsParent:!0,relevance:0},{begin:/(?=[^\n])\s/,relevance:0}]}]}),e.C_BLOCK_COMMENT_MODE,e.C_LINE_COMMENT_MODE]},
D=[e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,f,_,C,T,{match:/\$\d+/},m];h.contains=D.concat({begin:/\{/,end:/\}/,keywords:l,contains:["self"].concat(D)});let q=[].
concat(v,h.contains),z=q.concat([{begin:/(\s*)\(/,end:/\)/,keywords:l,contains:["self"].concat(q)}]),A={className:"params",begin:/(\s*)\(/,end:/\)/,excludeBegin:!0,
excludeEnd:!0,keywords:l,contains:z},Z={variants:[{match:[/class/,/\s+/,r,/\s+/,/extends/,/\s+/,t.concat(r,"(",t.concat(/\./,r),")*")],scope:{1:"keyword",3:"tit\
le.class",5:"keyword",7:"title.class.inherited"}},{match:[/class/,/\s+/,r],scope:{1:"keyword",3:"title.class"}}]},Y={relevance:0,match:t.either(/\bJSON/,/\b[A-Z][a-z]+([A-Z][a-z]*|\d)*/,
/\b[A-Z]{2,}([A-Z][a-z]+|\d)+([A-Z][a-z]*)*/,/\b[A-Z]{2,}[a-z]+([A-Z][a-z]+|\d)*([A-Z][a-z]*)*/),className:"title.class",keywords:{_:[...Ma,...La]}},X={label:"u\
se_strict",className:"meta",relevance:10,begin:/^\s*['"]use (strict|asm)['"]/},O={variants:[{match:[/function/,/\s+/,r,/(?=\s*\()/]},{match:[/function/,/\s*(?=\()/]}],
className:{1:"keyword",3:"title.function"},label:"func.def",contains:[A],illegal:/%/},oe={relevance:0,match:/\b[A-Z][A-Z_0-9]+\b/,className:"variable.constant"};
function ie(G){return t.concat("(?!",G.join("|"),")")}let W={match:t.concat(/\b/,ie([...Ba,"super","import","await"].map(G=>`${G}\\s*\\(`)),r,t.lookahead(/\s*\(/)),
className:"title.function",relevance:0},j={begin:t.concat(/\./,t.lookahead(t.concat(r,/(?![0-9A-Za-z$_(])/))),end:r,excludeBegin:!0,keywords:"prototype",className:"\
property",relevance:0},Q={match:[/get|set/,/\s+/,r,/(?=\()/],className:{1:"keyword",3:"title.function"},contains:[{begin:/\(\)/},A]},R="(\\([^()]*(\\([^()]*(\\([^(\
)]*\\)[^()]*)*\\)[^()]*)*\\)|"+e.UNDERSCORE_IDENT_RE+")\\s*=>",P={match:[/const|var|let/,/\s+/,r,/\s*/,/=\s*/,/(async\s*)?/,t.lookahead(R)],keywords:"async",className:{
1:"keyword",3:"title.function"},contains:[A]};return{name:"JavaScript",aliases:["js","jsx","mjs","cjs"],keywords:l,exports:{PARAMS_CONTAINS:z,CLASS_REFERENCE:Y},
illegal:/#(?![$_A-Za-z])/,contains:[e.SHEBANG({label:"shebang",binary:"node",relevance:5}),X,e.APOS_STRING_MODE,e.QUOTE_STRING_MODE,f,_,C,T,v,{match:/\$\d+/},m,
Y,{scope:"attr",match:r+t.lookahead(":"),relevance:0},P,{begin:"("+e.RE_STARTERS_RE+"|\\b(case|return|throw)\\b)\\s*",keywords:"return throw case",relevance:0,contains:[
v,e.REGEXP_MODE,{className:"function",begin:R,returnBegin:!0,end:"\\s*=>",contains:[{className:"params",variants:[{begin:e.UNDERSCORE_IDENT_RE,relevance:0},{className:null,
begin:/\(\s*\)/,skip:!0},{begin:/(\s*)\(/,end:/\)/,excludeBegin:!0,excludeEnd:!0,keywords:l,contains:z}]}]},{begin:/,/,relevance:0},{match:/\s+/,relevance:0},{variants:[
{begin:i.begin,end:i.end},{match:o},{begin:a.begin,"on:begin":a.isTrulyOpeningTag,end:a.end}],subLanguage:"xml",contains:[{begin:a.begin,end:a.end,skip:!0,contains:[
"self"]}]}]},O,{beginKeywords:"while if switch catch for"},{begin:"\\b(?!function)"+e.UNDERSCORE_IDENT_RE+"\\([^()]*(\\([^()]*(\\([^()]*\\)[^()]*)*\\)[^()]*)*\\)\\s*\\{",
returnBegin:!0,label:"func.def",contains:[A,e.inherit(e.TITLE_MODE,{begin:r,className:"title.function"})]},{match:/\.\.\./,relevance:0},j,{match:"\\$"+r,relevance:0},
{match:[/\bconstructor(?=\s*\()/],className:{1:"title.function"},contains:[A]},W,oe,Z,Q,{match:/\$[(.]/}]}}function Pa(e){let t=e.regex,n=xc(e),r=Tn,i=["any","v\
oid","number","boolean","string","object","never","symbol","bigint","unknown"],o={begin:[/namespace/,/\s+/,e.IDENT_RE],beginScope:{1:"keyword",3:"title.class"}},
a={beginKeywords:"interface",end:/\{/,excludeEnd:!0,keywords:{keyword:"interface extends",built_in:i},contains:[n.exports.CLASS_REFERENCE]},l={className:"meta",
relevance:10,begin:/^\s*['"]use strict['"]/},u=["type","interface","public","private","protected","implements","declare","abstract","readonly","enum","override",
"satisfies"],d={$pattern:Tn,keyword:Ra.concat(u),literal:Da,built_in:Fa.concat(i),"variable.language":qa},p={className:"meta",begin:"@"+r},m=(C,T,E)=>{let v=C.contains.
findIndex(D=>D.label===T);if(v===-1)throw new Error("can not find mode to replace");C.contains.splice(v,1,E)};Object.assign(n.keywords,d),n.exports.PARAMS_CONTAINS.
push(p);let h=n.contains.find(C=>C.scope==="attr"),f=Object.assign({},h,{match:t.concat(r,t.lookahead(/\s*\?:/))});n.exports.PARAMS_CONTAINS.push([n.exports.CLASS_REFERENCE,
h,f]),n.contains=n.contains.concat([p,o,a,f]),m(n,"shebang",e.SHEBANG()),m(n,"use_strict",l);let _=n.contains.find(C=>C.label==="func.def");return _.relevance=0,
Object.assign(n,{name:"TypeScript",aliases:["ts","tsx","mts","cts"]}),n}function za(e){let t=e.regex,n={className:"string",begin:/"(""|[^/n])"C\b/},r={className:"string",begin:/"/,end:/"/,illegal:/\n/,contains:[{begin:/""/}]},i=/\d{1,2}\/\d{1,2}\/\d{4}/,
o=/\d{4}-\d{1,2}-\d{1,2}/,a=/(\d|1[012])(:\d+){0,2} *(AM|PM)/,l=/\d{1,2}(:\d{1,2}){1,2}/,u={className:"literal",variants:[{begin:t.concat(/# */,t.either(o,i),/ *#/)},
{begin:t.concat(/# */,l,/ *#/)},{begin:t.concat(/# */,a,/ *#/)},{begin:t.concat(/# */,t.either(o,i),/ +/,t.either(a,l),/ *#/)}]},d={className:"number",relevance:0,
variants:[{begin:/\b\d[\d_]*((\.[\d_]+(E[+-]?[\d_]+)?)|(E[+-]?[\d_]+))[RFD@!#]?/},{begin:/\b\d[\d_]*((U?[SIL])|[%&])?/},{begin:/&H[\dA-F_]+((U?[SIL])|[%&])?/},{
begin:/&O[0-7_]+((U?[SIL])|[%&])?/},{begin:/&B[01_]+((U?[SIL])|[%&])?/}]},p={className:"label",begin:/^\w+:/},m=e.COMMENT(/'''/,/$/,{contains:[{className:"docta\
g",begin:/<\/?/,end:/>/}]}),h=e.COMMENT(null,/$/,{variants:[{begin:/'/},{begin:/([\t ]|^)REM(?=\s)/}]});return{name:"Visual Basic .NET",aliases:["vb"],case_insensitive:!0,
classNameAliases:{label:"symbol"},keywords:{keyword:"addhandler alias aggregate ansi as async assembly auto binary by byref byval call case catch class compare \
const continue custom declare default delegate dim distinct do each equals else elseif end enum erase error event exit explicit finally for friend from function\
 get global goto group handles if implements imports in inherits interface into iterator join key let lib loop me mid module mustinherit mustoverride mybase myc\
lass namespace narrowing new next notinheritable notoverridable of off on operator option optional order overloads overridable overrides paramarray partial pres\
erve private property protected public raiseevent readonly redim removehandler resume return select set shadows shared skip static step stop structure strict su\
b synclock take text then throw to try unicode until using when where while widening with withevents writeonly yield",built_in:"addressof and andalso await dire\
ctcast gettype getxmlnamespace is isfalse isnot istrue like mod nameof new not or orelse trycast typeof xor cbool cbyte cchar cdate cdbl cdec cint clng cobj csb\
yte cshort csng cstr cuint culng cushort",type:"boolean byte char date decimal double integer long object sbyte short single string uinteger ulong ushort",literal:"\
true false nothing"},illegal:"//|\\{|\\}|endif|gosub|variant|wend|^\\$ ",contains:[n,r,u,d,p,m,h,{className:"meta",begin:/[\t ]*#(const|disable|else|elseif|enable|end|externalsource|if|region)\b/,
end:/$/,keywords:{keyword:"const disable else elseif enable end externalsource if region then"},contains:[h]}]}}function Ua(e){e.regex;let t=e.COMMENT(/\(;/,/;\)/);t.contains.push("self");let n=e.COMMENT(/;;/,/$/),r=["anyfunc","block","br","br_if","br_table","call","call_\
indirect","data","drop","elem","else","end","export","func","global.get","global.set","local.get","local.set","local.tee","get_global","get_local","global","if",
"import","local","loop","memory","memory.grow","memory.size","module","mut","nop","offset","param","result","return","select","set_global","set_local","start","\
table","tee_local","then","type","unreachable"],i={begin:[/(?:func|call|call_indirect)/,/\s+/,/\$[^\s)]+/],className:{1:"keyword",3:"title.function"}},o={className:"\
variable",begin:/\$[\w_]+/},a={match:/(\((?!;)|\))+/,className:"punctuation",relevance:0},l={className:"number",relevance:0,match:/[+-]?\b(?:\d(?:_?\d)*(?:\.\d(?:_?\d)*)?(?:[eE][+-]?\d(?:_?\d)*)?|0x[\da-fA-F](?:_?[\da-fA-F])*(?:\.[\da-fA-F](?:_?[\da-fA-D])*)?(?:[pP][+-]?\d(?:_?\d)*)?)\b|\binf\b|\bnan(?::0x[\da-fA-F](?:_?[\da-fA-D])*)?\b/},
u={match:/(i32|i64|f32|f64)(?!\.)/,className:"type"},d={className:"keyword",match:/\b(f32|f64|i32|i64)(?:\.(?:abs|add|and|ceil|clz|const|convert_[su]\/i(?:32|64)|copysign|ctz|demote\/f64|div(?:_[su])?|eqz?|extend_[su]\/i32|floor|ge(?:_[su])?|gt(?:_[su])?|le(?:_[su])?|load(?:(?:8|16|32)_[su])?|lt(?:_[su])?|max|min|mul|nearest|neg?|or|popcnt|promote\/f32|reinterpret\/[fi](?:32|64)|rem_[su]|rot[lr]|shl|shr_[su]|store(?:8|16|32)?|sqrt|sub|trunc(?:_[su]\/f(?:32|64))?|wrap\/i64|xor))\b/};
return{name:"WebAssembly",keywords:{$pattern:/[\w.]+/,keyword:r},contains:[n,t,{match:[/(?:offset|align)/,/\s*/,/=/],className:{1:"keyword",3:"operator"}},o,a,i,
e.QUOTE_STRING_MODE,u,d,l]}}function $a(e){let t=e.regex,n=t.concat(/[\p{L}_]/u,t.optional(/[\p{L}0-9_.-]*:/u),/[\p{L}0-9_.-]*/u),r=/[\p{L}0-9._:-]+/u,i={className:"symbol",begin:/&[a-z]+;|&#[0-9]+;|&#x[a-f0-9]+;/},
o={begin:/\s/,contains:[{className:"keyword",begin:/#?[a-z_][a-z1-9_-]+/,illegal:/\n/}]},a=e.inherit(o,{begin:/\(/,end:/\)/}),l=e.inherit(e.APOS_STRING_MODE,{className:"\
string"}),u=e.inherit(e.QUOTE_STRING_MODE,{className:"string"}),d={endsWithParent:!0,illegal:/</,relevance:0,contains:[{className:"attr",begin:r,relevance:0},{begin:/=\s*/,
relevance:0,contains:[{className:"string",endsParent:!0,variants:[{begin:/"/,end:/"/,contains:[i]},{begin:/'/,end:/'/,contains:[i]},{begin:/[^\s"'=<>`]+/}]}]}]};
return{name:"HTML, XML",aliases:["html","xhtml","rss","atom","xjb","xsd","xsl","plist","wsf","svg"],case_insensitive:!0,unicodeRegex:!0,contains:[{className:"me\
ta",begin:/<![a-z]/,end:/>/,relevance:10,contains:[o,u,l,a,{begin:/\[/,end:/\]/,contains:[{className:"meta",begin:/<![a-z]/,end:/>/,contains:[o,a,u,l]}]}]},e.COMMENT(
/<!--/,/-->/,{relevance:10}),{begin:/<!\[CDATA\[/,end:/\]\]>/,relevance:10},i,{className:"meta",end:/\?>/,variants:[{begin:/<\?xml/,relevance:10,contains:[u]},{
begin:/<\?[a-z][a-z0-9]+/}]},{className:"tag",begin:/<style(?=\s|>)/,end:/>/,keywords:{name:"style"},contains:[d],starts:{end:/<\/style>/,returnEnd:!0,subLanguage:[
"css","xml"]}},{className:"tag",begin:/<script(?=\s|>)/,end:/>/,keywords:{name:"script"},contains:[d],starts:{end:/<\/script>/,returnEnd:!0,subLanguage:["javasc\
ript","handlebars","xml"]}},{className:"tag",begin:/<>|<\/>/},{className:"tag",begin:t.concat(/</,t.lookahead(t.concat(n,t.either(/\/>/,/>/,/\s/)))),end:/\/?>/,
contains:[{className:"name",begin:n,relevance:0,starts:d}]},{className:"tag",begin:t.concat(/<\//,t.lookahead(t.concat(n,/>/))),contains:[{className:"name",begin:n,
relevance:0},{begin:/>/,relevance:0,endsParent:!0}]}]}}function Ga(e){let t="true false yes no null",n="[\\w#;/?:@&=+$,.~*'()[\\]]+",r={className:"attr",variants:[{begin:/[\w*@][\w*@ :()\./-]*:(?=[ \t]|$)/},{begin:/"[\w*@][\w*@ :()\./-]*":(?=[ \t]|$)/},
{begin:/'[\w*@][\w*@ :()\./-]*':(?=[ \t]|$)/}]},i={className:"template-variable",variants:[{begin:/\{\{/,end:/\}\}/},{begin:/%\{/,end:/\}/}]},o={className:"stri\
ng",relevance:0,begin:/'/,end:/'/,contains:[{match:/''/,scope:"char.escape",relevance:0}]},a={className:"string",relevance:0,variants:[{begin:/"/,end:/"/},{begin:/\S+/}],
contains:[e.BACKSLASH_ESCAPE,i]},l=e.inherit(a,{variants:[{begin:/'/,end:/'/,contains:[{begin:/''/,relevance:0}]},{begin:/"/,end:/"/},{begin:/[^\s,{}[\]]+/}]}),
h={className:"number",begin:"\\b"+"[0-9]{4}(-[0-9][0-9]){0,2}"+"([Tt \\t][0-9][0-9]?(:[0-9][0-9]){2})?"+"(\\.[0-9]*)?"+"([ \\t])*(Z|[-+][0-9][0-9]?(:[0-9][0-9])?\
)?"+"\\b"},f={end:",",endsWithParent:!0,excludeEnd:!0,keywords:t,relevance:0},_={begin:/\{/,end:/\}/,contains:[f],illegal:"\\n",relevance:0},C={begin:"\\[",end:"\
\\]",contains:[f],illegal:"\\n",relevance:0},T=[r,{className:"meta",begin:"^---\\s*$",relevance:10},{className:"string",begin:"[\\|>]([1-9]?[+-])?[ ]*\\n( +)[^ ][\
^\\n]*\\n(\\2[^\\n]+\\n?)*"},{begin:"<%[%=-]?",end:"[%-]?%>",subLanguage:"ruby",excludeBegin:!0,excludeEnd:!0,relevance:0},{className:"type",begin:"!\\w+!"+n},{
className:"type",begin:"!<"+n+">"},{className:"type",begin:"!"+n},{className:"type",begin:"!!"+n},{className:"meta",begin:"&"+e.UNDERSCORE_IDENT_RE+"$"},{className:"\
meta",begin:"\\*"+e.UNDERSCORE_IDENT_RE+"$"},{className:"bullet",begin:"-(?=[ ]|$)",relevance:0},e.HASH_COMMENT_MODE,{beginKeywords:t,keywords:{literal:t}},h,{className:"\
number",begin:e.C_NUMBER_RE+"\\b",relevance:0},_,C,o,a],E=[...T];return E.pop(),E.push(l),f.contains=E,{name:"YAML",case_insensitive:!0,aliases:["yml"],contains:T}}var Ha={arduino:Pi,bash:zi,c:Ui,cpp:$i,csharp:Gi,css:Hi,diff:Ki,go:Wi,graphql:Vi,ini:Zi,java:Qi,javascript:na,json:ra,kotlin:ia,less:sa,lua:la,makefile:ca,markdown:ua,
objectivec:da,perl:pa,php:ma,"php-template":ha,plaintext:fa,python:ga,"python-repl":ba,r:xa,ruby:ya,rust:wa,scss:_a,shell:Ea,sql:ka,swift:Ia,typescript:Pa,vbnet:za,
wasm:Ua,xml:$a,yaml:Ga};var po=Dl(uo(),1);var mo=po.default;var ho={},lu="hljs-";function fo(e){let t=mo.newInstance();return e&&o(e),{highlight:n,highlightAuto:r,listLanguages:i,register:o,registerAlias:a,registered:l};
function n(u,d,p){let m=p||ho,h=typeof m.prefix=="string"?m.prefix:lu;if(!t.getLanguage(u))throw new Error("Unknown language: `"+u+"` is not registered");t.configure(
{__emitter:Sr,classPrefix:h});let f=t.highlight(d,{ignoreIllegals:!0,language:u});if(f.errorRaised)throw new Error("Could not highlight with `Highlight.js`",{cause:f.
errorRaised});let _=f._emitter.root,C=_.data;return C.language=f.language,C.relevance=f.relevance,_}function r(u,d){let m=(d||ho).subset||i(),h=-1,f=0,_;for(;++h<
m.length;){let C=m[h];if(!t.getLanguage(C))continue;let T=n(C,u,d);T.data&&T.data.relevance!==void 0&&T.data.relevance>f&&(f=T.data.relevance,_=T)}return _||{type:"\
root",children:[],data:{language:void 0,relevance:f}}}function i(){return t.listLanguages()}function o(u,d){if(typeof u=="string")t.registerLanguage(u,d);else{let p;
for(p in u)Object.hasOwn(u,p)&&t.registerLanguage(p,u[p])}}function a(u,d){if(typeof u=="string")t.registerAliases(typeof d=="string"?d:[...d],{languageName:u});else{
let p;for(p in u)if(Object.hasOwn(u,p)){let m=u[p];t.registerAliases(typeof m=="string"?m:[...m],{languageName:p})}}}function l(u){return!!t.getLanguage(u)}}var Sr=class{constructor(t){
this.options=t,this.root={type:"root",children:[],data:{language:void 0,relevance:0}},this.stack=[this.root]}addText(t){if(t==="")return;let n=this.stack[this.stack.
length-1],r=n.children[n.children.length-1];r&&r.type==="text"?r.value+=t:n.children.push({type:"text",value:t})}startScope(t){this.openNode(String(t))}endScope(){
this.closeNode()}__addSublanguage(t,n){let r=this.stack[this.stack.length-1],i=t.root.children;n?r.children.push({type:"element",tagName:"span",properties:{className:[
n]},children:i}):r.children.push(...i)}openNode(t){let n=this,r=t.split(".").map(function(a,l){return l?a+"_".repeat(l):n.options.classPrefix+a}),i=this.stack[this.
stack.length-1],o={type:"element",tagName:"span",properties:{className:r},children:[]};i.children.push(o),this.stack.push(o)}closeNode(){this.stack.pop()}finalize(){}toHTML(){
return""}};var cu={};function vr(e,t){let n=t||cu,r=typeof n.includeImageAlt=="boolean"?n.includeImageAlt:!0,i=typeof n.includeHtml=="boolean"?n.includeHtml:!0;return bo(e,
r,i)}function bo(e,t,n){if(uu(e)){if("value"in e)return e.type==="html"&&!n?"":e.value;if(t&&"alt"in e&&e.alt)return e.alt;if("children"in e)return go(e.children,
t,n)}return Array.isArray(e)?go(e,t,n):""}function go(e,t,n){let r=[],i=-1;for(;++i<e.length;)r[i]=bo(e[i],t,n);return r.join("")}function uu(e){return!!(e&&typeof e==
"object")}var Ar={AElig:"\xC6",AMP:"&",Aacute:"\xC1",Abreve:"\u0102",Acirc:"\xC2",Acy:"\u0410",Afr:"\u{1D504}",Agrave:"\xC0",Alpha:"\u0391",Amacr:"\u0100",And:"\u2A53",Aogon:"\
\u0104",Aopf:"\u{1D538}",ApplyFunction:"\u2061",Aring:"\xC5",Ascr:"\u{1D49C}",Assign:"\u2254",Atilde:"\xC3",Auml:"\xC4",Backslash:"\u2216",Barv:"\u2AE7",Barwed:"\
\u2306",Bcy:"\u0411",Because:"\u2235",Bernoullis:"\u212C",Beta:"\u0392",Bfr:"\u{1D505}",Bopf:"\u{1D539}",Breve:"\u02D8",Bscr:"\u212C",Bumpeq:"\u224E",CHcy:"\u0427",
COPY:"\xA9",Cacute:"\u0106",Cap:"\u22D2",CapitalDifferentialD:"\u2145",Cayleys:"\u212D",Ccaron:"\u010C",Ccedil:"\xC7",Ccirc:"\u0108",Cconint:"\u2230",Cdot:"\u010A",
Cedilla:"\xB8",CenterDot:"\xB7",Cfr:"\u212D",Chi:"\u03A7",CircleDot:"\u2299",CircleMinus:"\u2296",CirclePlus:"\u2295",CircleTimes:"\u2297",ClockwiseContourIntegral:"\
\u2232",CloseCurlyDoubleQuote:"\u201D",CloseCurlyQuote:"\u2019",Colon:"\u2237",Colone:"\u2A74",Congruent:"\u2261",Conint:"\u222F",ContourIntegral:"\u222E",Copf:"\
\u2102",Coproduct:"\u2210",CounterClockwiseContourIntegral:"\u2233",Cross:"\u2A2F",Cscr:"\u{1D49E}",Cup:"\u22D3",CupCap:"\u224D",DD:"\u2145",DDotrahd:"\u2911",DJcy:"\
\u0402",DScy:"\u0405",DZcy:"\u040F",Dagger:"\u2021",Darr:"\u21A1",Dashv:"\u2AE4",Dcaron:"\u010E",Dcy:"\u0414",Del:"\u2207",Delta:"\u0394",Dfr:"\u{1D507}",DiacriticalAcute:"\
\xB4",DiacriticalDot:"\u02D9",DiacriticalDoubleAcute:"\u02DD",DiacriticalGrave:"`",DiacriticalTilde:"\u02DC",Diamond:"\u22C4",DifferentialD:"\u2146",Dopf:"\u{1D53B}",
Dot:"\xA8",DotDot:"\u20DC",DotEqual:"\u2250",DoubleContourIntegral:"\u222F",DoubleDot:"\xA8",DoubleDownArrow:"\u21D3",DoubleLeftArrow:"\u21D0",DoubleLeftRightArrow:"\
\u21D4",DoubleLeftTee:"\u2AE4",DoubleLongLeftArrow:"\u27F8",DoubleLongLeftRightArrow:"\u27FA",DoubleLongRightArrow:"\u27F9",DoubleRightArrow:"\u21D2",DoubleRightTee:"\
\u22A8",DoubleUpArrow:"\u21D1",DoubleUpDownArrow:"\u21D5",DoubleVerticalBar:"\u2225",DownArrow:"\u2193",DownArrowBar:"\u2913",DownArrowUpArrow:"\u21F5",DownBreve:"\
\u0311",DownLeftRightVector:"\u2950",DownLeftTeeVector:"\u295E",DownLeftVector:"\u21BD",DownLeftVectorBar:"\u2956",DownRightTeeVector:"\u295F",DownRightVector:"\
\u21C1",DownRightVectorBar:"\u2957",DownTee:"\u22A4",DownTeeArrow:"\u21A7",Downarrow:"\u21D3",Dscr:"\u{1D49F}",Dstrok:"\u0110",ENG:"\u014A",ETH:"\xD0",Eacute:"\xC9",
Ecaron:"\u011A",Ecirc:"\xCA",Ecy:"\u042D",Edot:"\u0116",Efr:"\u{1D508}",Egrave:"\xC8",Element:"\u2208",Emacr:"\u0112",EmptySmallSquare:"\u25FB",EmptyVerySmallSquare:"\
\u25AB",Eogon:"\u0118",Eopf:"\u{1D53C}",Epsilon:"\u0395",Equal:"\u2A75",EqualTilde:"\u2242",Equilibrium:"\u21CC",Escr:"\u2130",Esim:"\u2A73",Eta:"\u0397",Euml:"\
\xCB",Exists:"\u2203",ExponentialE:"\u2147",Fcy:"\u0424",Ffr:"\u{1D509}",FilledSmallSquare:"\u25FC",FilledVerySmallSquare:"\u25AA",Fopf:"\u{1D53D}",ForAll:"\u2200",
Fouriertrf:"\u2131",Fscr:"\u2131",GJcy:"\u0403",GT:">",Gamma:"\u0393",Gammad:"\u03DC",Gbreve:"\u011E",Gcedil:"\u0122",Gcirc:"\u011C",Gcy:"\u0413",Gdot:"\u0120",
Gfr:"\u{1D50A}",Gg:"\u22D9",Gopf:"\u{1D53E}",GreaterEqual:"\u2265",GreaterEqualLess:"\u22DB",GreaterFullEqual:"\u2267",GreaterGreater:"\u2AA2",GreaterLess:"\u2277",
GreaterSlantEqual:"\u2A7E",GreaterTilde:"\u2273",Gscr:"\u{1D4A2}",Gt:"\u226B",HARDcy:"\u042A",Hacek:"\u02C7",Hat:"^",Hcirc:"\u0124",Hfr:"\u210C",HilbertSpace:"\u210B",
Hopf:"\u210D",HorizontalLine:"\u2500",Hscr:"\u210B",Hstrok:"\u0126",HumpDownHump:"\u224E",HumpEqual:"\u224F",IEcy:"\u0415",IJlig:"\u0132",IOcy:"\u0401",Iacute:"\
\xCD",Icirc:"\xCE",Icy:"\u0418",Idot:"\u0130",Ifr:"\u2111",Igrave:"\xCC",Im:"\u2111",Imacr:"\u012A",ImaginaryI:"\u2148",Implies:"\u21D2",Int:"\u222C",Integral:"\
\u222B",Intersection:"\u22C2",InvisibleComma:"\u2063",InvisibleTimes:"\u2062",Iogon:"\u012E",Iopf:"\u{1D540}",Iota:"\u0399",Iscr:"\u2110",Itilde:"\u0128",Iukcy:"\
\u0406",Iuml:"\xCF",Jcirc:"\u0134",Jcy:"\u0419",Jfr:"\u{1D50D}",Jopf:"\u{1D541}",Jscr:"\u{1D4A5}",Jsercy:"\u0408",Jukcy:"\u0404",KHcy:"\u0425",KJcy:"\u040C",Kappa:"\
\u039A",Kcedil:"\u0136",Kcy:"\u041A",Kfr:"\u{1D50E}",Kopf:"\u{1D542}",Kscr:"\u{1D4A6}",LJcy:"\u0409",LT:"<",Lacute:"\u0139",Lambda:"\u039B",Lang:"\u27EA",Laplacetrf:"\
\u2112",Larr:"\u219E",Lcaron:"\u013D",Lcedil:"\u013B",Lcy:"\u041B",LeftAngleBracket:"\u27E8",LeftArrow:"\u2190",LeftArrowBar:"\u21E4",LeftArrowRightArrow:"\u21C6",
LeftCeiling:"\u2308",LeftDoubleBracket:"\u27E6",LeftDownTeeVector:"\u2961",LeftDownVector:"\u21C3",LeftDownVectorBar:"\u2959",LeftFloor:"\u230A",LeftRightArrow:"\
\u2194",LeftRightVector:"\u294E",LeftTee:"\u22A3",LeftTeeArrow:"\u21A4",LeftTeeVector:"\u295A",LeftTriangle:"\u22B2",LeftTriangleBar:"\u29CF",LeftTriangleEqual:"\
\u22B4",LeftUpDownVector:"\u2951",LeftUpTeeVector:"\u2960",LeftUpVector:"\u21BF",LeftUpVectorBar:"\u2958",LeftVector:"\u21BC",LeftVectorBar:"\u2952",Leftarrow:"\
\u21D0",Leftrightarrow:"\u21D4",LessEqualGreater:"\u22DA",LessFullEqual:"\u2266",LessGreater:"\u2276",LessLess:"\u2AA1",LessSlantEqual:"\u2A7D",LessTilde:"\u2272",
Lfr:"\u{1D50F}",Ll:"\u22D8",Lleftarrow:"\u21DA",Lmidot:"\u013F",LongLeftArrow:"\u27F5",LongLeftRightArrow:"\u27F7",LongRightArrow:"\u27F6",Longleftarrow:"\u27F8",
Longleftrightarrow:"\u27FA",Longrightarrow:"\u27F9",Lopf:"\u{1D543}",LowerLeftArrow:"\u2199",LowerRightArrow:"\u2198",Lscr:"\u2112",Lsh:"\u21B0",Lstrok:"\u0141",
Lt:"\u226A",Map:"\u2905",Mcy:"\u041C",MediumSpace:"\u205F",Mellintrf:"\u2133",Mfr:"\u{1D510}",MinusPlus:"\u2213",Mopf:"\u{1D544}",Mscr:"\u2133",Mu:"\u039C",NJcy:"\
\u040A",Nacute:"\u0143",Ncaron:"\u0147",Ncedil:"\u0145",Ncy:"\u041D",NegativeMediumSpace:"\u200B",NegativeThickSpace:"\u200B",NegativeThinSpace:"\u200B",NegativeVeryThinSpace:"\
\u200B",NestedGreaterGreater:"\u226B",NestedLessLess:"\u226A",NewLine:`
`,Nfr:"\u{1D511}",NoBreak:"\u2060",NonBreakingSpace:"\xA0",Nopf:"\u2115",Not:"\u2AEC",NotCongruent:"\u2262",NotCupCap:"\u226D",NotDoubleVerticalBar:"\u2226",NotElement:"\
\u2209",NotEqual:"\u2260",NotEqualTilde:"\u2242\u0338",NotExists:"\u2204",NotGreater:"\u226F",NotGreaterEqual:"\u2271",NotGreaterFullEqual:"\u2267\u0338",NotGreaterGreater:"\
\u226B\u0338",NotGreaterLess:"\u2279",NotGreaterSlantEqual:"\u2A7E\u0338",NotGreaterTilde:"\u2275",NotHumpDownHump:"\u224E\u0338",NotHumpEqual:"\u224F\u0338",NotLeftTriangle:"\
\u22EA",NotLeftTriangleBar:"\u29CF\u0338",NotLeftTriangleEqual:"\u22EC",NotLess:"\u226E",NotLessEqual:"\u2270",NotLessGreater:"\u2278",NotLessLess:"\u226A\u0338",
NotLessSlantEqual:"\u2A7D\u0338",NotLessTilde:"\u2274",NotNestedGreaterGreater:"\u2AA2\u0338",NotNestedLessLess:"\u2AA1\u0338",NotPrecedes:"\u2280",NotPrecedesEqual:"\
\u2AAF\u0338",NotPrecedesSlantEqual:"\u22E0",NotReverseElement:"\u220C",NotRightTriangle:"\u22EB",NotRightTriangleBar:"\u29D0\u0338",NotRightTriangleEqual:"\u22ED",
NotSquareSubset:"\u228F\u0338",NotSquareSubsetEqual:"\u22E2",NotSquareSuperset:"\u2290\u0338",NotSquareSupersetEqual:"\u22E3",NotSubset:"\u2282\u20D2",NotSubsetEqual:"\
\u2288",NotSucceeds:"\u2281",NotSucceedsEqual:"\u2AB0\u0338",NotSucceedsSlantEqual:"\u22E1",NotSucceedsTilde:"\u227F\u0338",NotSuperset:"\u2283\u20D2",NotSupersetEqual:"\
\u2289",NotTilde:"\u2241",NotTildeEqual:"\u2244",NotTildeFullEqual:"\u2247",NotTildeTilde:"\u2249",NotVerticalBar:"\u2224",Nscr:"\u{1D4A9}",Ntilde:"\xD1",Nu:"\u039D",
OElig:"\u0152",Oacute:"\xD3",Ocirc:"\xD4",Ocy:"\u041E",Odblac:"\u0150",Ofr:"\u{1D512}",Ograve:"\xD2",Omacr:"\u014C",Omega:"\u03A9",Omicron:"\u039F",Oopf:"\u{1D546}",
OpenCurlyDoubleQuote:"\u201C",OpenCurlyQuote:"\u2018",Or:"\u2A54",Oscr:"\u{1D4AA}",Oslash:"\xD8",Otilde:"\xD5",Otimes:"\u2A37",Ouml:"\xD6",OverBar:"\u203E",OverBrace:"\
\u23DE",OverBracket:"\u23B4",OverParenthesis:"\u23DC",PartialD:"\u2202",Pcy:"\u041F",Pfr:"\u{1D513}",Phi:"\u03A6",Pi:"\u03A0",PlusMinus:"\xB1",Poincareplane:"\u210C",
Popf:"\u2119",Pr:"\u2ABB",Precedes:"\u227A",PrecedesEqual:"\u2AAF",PrecedesSlantEqual:"\u227C",PrecedesTilde:"\u227E",Prime:"\u2033",Product:"\u220F",Proportion:"\
\u2237",Proportional:"\u221D",Pscr:"\u{1D4AB}",Psi:"\u03A8",QUOT:'"',Qfr:"\u{1D514}",Qopf:"\u211A",Qscr:"\u{1D4AC}",RBarr:"\u2910",REG:"\xAE",Racute:"\u0154",Rang:"\
\u27EB",Rarr:"\u21A0",Rarrtl:"\u2916",Rcaron:"\u0158",Rcedil:"\u0156",Rcy:"\u0420",Re:"\u211C",ReverseElement:"\u220B",ReverseEquilibrium:"\u21CB",ReverseUpEquilibrium:"\
\u296F",Rfr:"\u211C",Rho:"\u03A1",RightAngleBracket:"\u27E9",RightArrow:"\u2192",RightArrowBar:"\u21E5",RightArrowLeftArrow:"\u21C4",RightCeiling:"\u2309",RightDoubleBracket:"\
\u27E7",RightDownTeeVector:"\u295D",RightDownVector:"\u21C2",RightDownVectorBar:"\u2955",RightFloor:"\u230B",RightTee:"\u22A2",RightTeeArrow:"\u21A6",RightTeeVector:"\
\u295B",RightTriangle:"\u22B3",RightTriangleBar:"\u29D0",RightTriangleEqual:"\u22B5",RightUpDownVector:"\u294F",RightUpTeeVector:"\u295C",RightUpVector:"\u21BE",
RightUpVectorBar:"\u2954",RightVector:"\u21C0",RightVectorBar:"\u2953",Rightarrow:"\u21D2",Ropf:"\u211D",RoundImplies:"\u2970",Rrightarrow:"\u21DB",Rscr:"\u211B",
Rsh:"\u21B1",RuleDelayed:"\u29F4",SHCHcy:"\u0429",SHcy:"\u0428",SOFTcy:"\u042C",Sacute:"\u015A",Sc:"\u2ABC",Scaron:"\u0160",Scedil:"\u015E",Scirc:"\u015C",Scy:"\
\u0421",Sfr:"\u{1D516}",ShortDownArrow:"\u2193",ShortLeftArrow:"\u2190",ShortRightArrow:"\u2192",ShortUpArrow:"\u2191",Sigma:"\u03A3",SmallCircle:"\u2218",Sopf:"\
\u{1D54A}",Sqrt:"\u221A",Square:"\u25A1",SquareIntersection:"\u2293",SquareSubset:"\u228F",SquareSubsetEqual:"\u2291",SquareSuperset:"\u2290",SquareSupersetEqual:"\
\u2292",SquareUnion:"\u2294",Sscr:"\u{1D4AE}",Star:"\u22C6",Sub:"\u22D0",Subset:"\u22D0",SubsetEqual:"\u2286",Succeeds:"\u227B",SucceedsEqual:"\u2AB0",SucceedsSlantEqual:"\
\u227D",SucceedsTilde:"\u227F",SuchThat:"\u220B",Sum:"\u2211",Sup:"\u22D1",Superset:"\u2283",SupersetEqual:"\u2287",Supset:"\u22D1",THORN:"\xDE",TRADE:"\u2122",
TSHcy:"\u040B",TScy:"\u0426",Tab:"	",Tau:"\u03A4",Tcaron:"\u0164",Tcedil:"\u0162",Tcy:"\u0422",Tfr:"\u{1D517}",Therefore:"\u2234",Theta:"\u0398",ThickSpace:"\u205F\u200A",
ThinSpace:"\u2009",Tilde:"\u223C",TildeEqual:"\u2243",TildeFullEqual:"\u2245",TildeTilde:"\u2248",Topf:"\u{1D54B}",TripleDot:"\u20DB",Tscr:"\u{1D4AF}",Tstrok:"\u0166",
Uacute:"\xDA",Uarr:"\u219F",Uarrocir:"\u2949",Ubrcy:"\u040E",Ubreve:"\u016C",Ucirc:"\xDB",Ucy:"\u0423",Udblac:"\u0170",Ufr:"\u{1D518}",Ugrave:"\xD9",Umacr:"\u016A",
UnderBar:"_",UnderBrace:"\u23DF",UnderBracket:"\u23B5",UnderParenthesis:"\u23DD",Union:"\u22C3",UnionPlus:"\u228E",Uogon:"\u0172",Uopf:"\u{1D54C}",UpArrow:"\u2191",
UpArrowBar:"\u2912",UpArrowDownArrow:"\u21C5",UpDownArrow:"\u2195",UpEquilibrium:"\u296E",UpTee:"\u22A5",UpTeeArrow:"\u21A5",Uparrow:"\u21D1",Updownarrow:"\u21D5",
UpperLeftArrow:"\u2196",UpperRightArrow:"\u2197",Upsi:"\u03D2",Upsilon:"\u03A5",Uring:"\u016E",Uscr:"\u{1D4B0}",Utilde:"\u0168",Uuml:"\xDC",VDash:"\u22AB",Vbar:"\
\u2AEB",Vcy:"\u0412",Vdash:"\u22A9",Vdashl:"\u2AE6",Vee:"\u22C1",Verbar:"\u2016",Vert:"\u2016",VerticalBar:"\u2223",VerticalLine:"|",VerticalSeparator:"\u2758",
VerticalTilde:"\u2240",VeryThinSpace:"\u200A",Vfr:"\u{1D519}",Vopf:"\u{1D54D}",Vscr:"\u{1D4B1}",Vvdash:"\u22AA",Wcirc:"\u0174",Wedge:"\u22C0",Wfr:"\u{1D51A}",Wopf:"\
\u{1D54E}",Wscr:"\u{1D4B2}",Xfr:"\u{1D51B}",Xi:"\u039E",Xopf:"\u{1D54F}",Xscr:"\u{1D4B3}",YAcy:"\u042F",YIcy:"\u0407",YUcy:"\u042E",Yacute:"\xDD",Ycirc:"\u0176",
Ycy:"\u042B",Yfr:"\u{1D51C}",Yopf:"\u{1D550}",Yscr:"\u{1D4B4}",Yuml:"\u0178",ZHcy:"\u0416",Zacute:"\u0179",Zcaron:"\u017D",Zcy:"\u0417",Zdot:"\u017B",ZeroWidthSpace:"\
\u200B",Zeta:"\u0396",Zfr:"\u2128",Zopf:"\u2124",Zscr:"\u{1D4B5}",aacute:"\xE1",abreve:"\u0103",ac:"\u223E",acE:"\u223E\u0333",acd:"\u223F",acirc:"\xE2",acute:"\
\xB4",acy:"\u0430",aelig:"\xE6",af:"\u2061",afr:"\u{1D51E}",agrave:"\xE0",alefsym:"\u2135",aleph:"\u2135",alpha:"\u03B1",amacr:"\u0101",amalg:"\u2A3F",amp:"&",and:"\
\u2227",andand:"\u2A55",andd:"\u2A5C",andslope:"\u2A58",andv:"\u2A5A",ang:"\u2220",ange:"\u29A4",angle:"\u2220",angmsd:"\u2221",angmsdaa:"\u29A8",angmsdab:"\u29A9",
angmsdac:"\u29AA",angmsdad:"\u29AB",angmsdae:"\u29AC",angmsdaf:"\u29AD",angmsdag:"\u29AE",angmsdah:"\u29AF",angrt:"\u221F",angrtvb:"\u22BE",angrtvbd:"\u299D",angsph:"\
\u2222",angst:"\xC5",angzarr:"\u237C",aogon:"\u0105",aopf:"\u{1D552}",ap:"\u2248",apE:"\u2A70",apacir:"\u2A6F",ape:"\u224A",apid:"\u224B",apos:"'",approx:"\u2248",
approxeq:"\u224A",aring:"\xE5",ascr:"\u{1D4B6}",ast:"*",asymp:"\u2248",asympeq:"\u224D",atilde:"\xE3",auml:"\xE4",awconint:"\u2233",awint:"\u2A11",bNot:"\u2AED",
backcong:"\u224C",backepsilon:"\u03F6",backprime:"\u2035",backsim:"\u223D",backsimeq:"\u22CD",barvee:"\u22BD",barwed:"\u2305",barwedge:"\u2305",bbrk:"\u23B5",bbrktbrk:"\
\u23B6",bcong:"\u224C",bcy:"\u0431",bdquo:"\u201E",becaus:"\u2235",because:"\u2235",bemptyv:"\u29B0",bepsi:"\u03F6",bernou:"\u212C",beta:"\u03B2",beth:"\u2136",
between:"\u226C",bfr:"\u{1D51F}",bigcap:"\u22C2",bigcirc:"\u25EF",bigcup:"\u22C3",bigodot:"\u2A00",bigoplus:"\u2A01",bigotimes:"\u2A02",bigsqcup:"\u2A06",bigstar:"\
\u2605",bigtriangledown:"\u25BD",bigtriangleup:"\u25B3",biguplus:"\u2A04",bigvee:"\u22C1",bigwedge:"\u22C0",bkarow:"\u290D",blacklozenge:"\u29EB",blacksquare:"\u25AA",
blacktriangle:"\u25B4",blacktriangledown:"\u25BE",blacktriangleleft:"\u25C2",blacktriangleright:"\u25B8",blank:"\u2423",blk12:"\u2592",blk14:"\u2591",blk34:"\u2593",
block:"\u2588",bne:"=\u20E5",bnequiv:"\u2261\u20E5",bnot:"\u2310",bopf:"\u{1D553}",bot:"\u22A5",bottom:"\u22A5",bowtie:"\u22C8",boxDL:"\u2557",boxDR:"\u2554",boxDl:"\
\u2556",boxDr:"\u2553",boxH:"\u2550",boxHD:"\u2566",boxHU:"\u2569",boxHd:"\u2564",boxHu:"\u2567",boxUL:"\u255D",boxUR:"\u255A",boxUl:"\u255C",boxUr:"\u2559",boxV:"\
\u2551",boxVH:"\u256C",boxVL:"\u2563",boxVR:"\u2560",boxVh:"\u256B",boxVl:"\u2562",boxVr:"\u255F",boxbox:"\u29C9",boxdL:"\u2555",boxdR:"\u2552",boxdl:"\u2510",boxdr:"\
\u250C",boxh:"\u2500",boxhD:"\u2565",boxhU:"\u2568",boxhd:"\u252C",boxhu:"\u2534",boxminus:"\u229F",boxplus:"\u229E",boxtimes:"\u22A0",boxuL:"\u255B",boxuR:"\u2558",
boxul:"\u2518",boxur:"\u2514",boxv:"\u2502",boxvH:"\u256A",boxvL:"\u2561",boxvR:"\u255E",boxvh:"\u253C",boxvl:"\u2524",boxvr:"\u251C",bprime:"\u2035",breve:"\u02D8",
brvbar:"\xA6",bscr:"\u{1D4B7}",bsemi:"\u204F",bsim:"\u223D",bsime:"\u22CD",bsol:"\\",bsolb:"\u29C5",bsolhsub:"\u27C8",bull:"\u2022",bullet:"\u2022",bump:"\u224E",
bumpE:"\u2AAE",bumpe:"\u224F",bumpeq:"\u224F",cacute:"\u0107",cap:"\u2229",capand:"\u2A44",capbrcup:"\u2A49",capcap:"\u2A4B",capcup:"\u2A47",capdot:"\u2A40",caps:"\
\u2229\uFE00",caret:"\u2041",caron:"\u02C7",ccaps:"\u2A4D",ccaron:"\u010D",ccedil:"\xE7",ccirc:"\u0109",ccups:"\u2A4C",ccupssm:"\u2A50",cdot:"\u010B",cedil:"\xB8",
cemptyv:"\u29B2",cent:"\xA2",centerdot:"\xB7",cfr:"\u{1D520}",chcy:"\u0447",check:"\u2713",checkmark:"\u2713",chi:"\u03C7",cir:"\u25CB",cirE:"\u29C3",circ:"\u02C6",
circeq:"\u2257",circlearrowleft:"\u21BA",circlearrowright:"\u21BB",circledR:"\xAE",circledS:"\u24C8",circledast:"\u229B",circledcirc:"\u229A",circleddash:"\u229D",
cire:"\u2257",cirfnint:"\u2A10",cirmid:"\u2AEF",cirscir:"\u29C2",clubs:"\u2663",clubsuit:"\u2663",colon:":",colone:"\u2254",coloneq:"\u2254",comma:",",commat:"@",
comp:"\u2201",compfn:"\u2218",complement:"\u2201",complexes:"\u2102",cong:"\u2245",congdot:"\u2A6D",conint:"\u222E",copf:"\u{1D554}",coprod:"\u2210",copy:"\xA9",
copysr:"\u2117",crarr:"\u21B5",cross:"\u2717",cscr:"\u{1D4B8}",csub:"\u2ACF",csube:"\u2AD1",csup:"\u2AD0",csupe:"\u2AD2",ctdot:"\u22EF",cudarrl:"\u2938",cudarrr:"\
\u2935",cuepr:"\u22DE",cuesc:"\u22DF",cularr:"\u21B6",cularrp:"\u293D",cup:"\u222A",cupbrcap:"\u2A48",cupcap:"\u2A46",cupcup:"\u2A4A",cupdot:"\u228D",cupor:"\u2A45",
cups:"\u222A\uFE00",curarr:"\u21B7",curarrm:"\u293C",curlyeqprec:"\u22DE",curlyeqsucc:"\u22DF",curlyvee:"\u22CE",curlywedge:"\u22CF",curren:"\xA4",curvearrowleft:"\
\u21B6",curvearrowright:"\u21B7",cuvee:"\u22CE",cuwed:"\u22CF",cwconint:"\u2232",cwint:"\u2231",cylcty:"\u232D",dArr:"\u21D3",dHar:"\u2965",dagger:"\u2020",daleth:"\
\u2138",darr:"\u2193",dash:"\u2010",dashv:"\u22A3",dbkarow:"\u290F",dblac:"\u02DD",dcaron:"\u010F",dcy:"\u0434",dd:"\u2146",ddagger:"\u2021",ddarr:"\u21CA",ddotseq:"\
\u2A77",deg:"\xB0",delta:"\u03B4",demptyv:"\u29B1",dfisht:"\u297F",dfr:"\u{1D521}",dharl:"\u21C3",dharr:"\u21C2",diam:"\u22C4",diamond:"\u22C4",diamondsuit:"\u2666",
diams:"\u2666",die:"\xA8",digamma:"\u03DD",disin:"\u22F2",div:"\xF7",divide:"\xF7",divideontimes:"\u22C7",divonx:"\u22C7",djcy:"\u0452",dlcorn:"\u231E",dlcrop:"\
\u230D",dollar:"$",dopf:"\u{1D555}",dot:"\u02D9",doteq:"\u2250",doteqdot:"\u2251",dotminus:"\u2238",dotplus:"\u2214",dotsquare:"\u22A1",doublebarwedge:"\u2306",
downarrow:"\u2193",downdownarrows:"\u21CA",downharpoonleft:"\u21C3",downharpoonright:"\u21C2",drbkarow:"\u2910",drcorn:"\u231F",drcrop:"\u230C",dscr:"\u{1D4B9}",
dscy:"\u0455",dsol:"\u29F6",dstrok:"\u0111",dtdot:"\u22F1",dtri:"\u25BF",dtrif:"\u25BE",duarr:"\u21F5",duhar:"\u296F",dwangle:"\u29A6",dzcy:"\u045F",dzigrarr:"\u27FF",
eDDot:"\u2A77",eDot:"\u2251",eacute:"\xE9",easter:"\u2A6E",ecaron:"\u011B",ecir:"\u2256",ecirc:"\xEA",ecolon:"\u2255",ecy:"\u044D",edot:"\u0117",ee:"\u2147",efDot:"\
\u2252",efr:"\u{1D522}",eg:"\u2A9A",egrave:"\xE8",egs:"\u2A96",egsdot:"\u2A98",el:"\u2A99",elinters:"\u23E7",ell:"\u2113",els:"\u2A95",elsdot:"\u2A97",emacr:"\u0113",
empty:"\u2205",emptyset:"\u2205",emptyv:"\u2205",emsp13:"\u2004",emsp14:"\u2005",emsp:"\u2003",eng:"\u014B",ensp:"\u2002",eogon:"\u0119",eopf:"\u{1D556}",epar:"\
\u22D5",eparsl:"\u29E3",eplus:"\u2A71",epsi:"\u03B5",epsilon:"\u03B5",epsiv:"\u03F5",eqcirc:"\u2256",eqcolon:"\u2255",eqsim:"\u2242",eqslantgtr:"\u2A96",eqslantless:"\
\u2A95",equals:"=",equest:"\u225F",equiv:"\u2261",equivDD:"\u2A78",eqvparsl:"\u29E5",erDot:"\u2253",erarr:"\u2971",escr:"\u212F",esdot:"\u2250",esim:"\u2242",eta:"\
\u03B7",eth:"\xF0",euml:"\xEB",euro:"\u20AC",excl:"!",exist:"\u2203",expectation:"\u2130",exponentiale:"\u2147",fallingdotseq:"\u2252",fcy:"\u0444",female:"\u2640",
ffilig:"\uFB03",fflig:"\uFB00",ffllig:"\uFB04",ffr:"\u{1D523}",filig:"\uFB01",fjlig:"fj",flat:"\u266D",fllig:"\uFB02",fltns:"\u25B1",fnof:"\u0192",fopf:"\u{1D557}",
forall:"\u2200",fork:"\u22D4",forkv:"\u2AD9",fpartint:"\u2A0D",frac12:"\xBD",frac13:"\u2153",frac14:"\xBC",frac15:"\u2155",frac16:"\u2159",frac18:"\u215B",frac23:"\
\u2154",frac25:"\u2156",frac34:"\xBE",frac35:"\u2157",frac38:"\u215C",frac45:"\u2158",frac56:"\u215A",frac58:"\u215D",frac78:"\u215E",frasl:"\u2044",frown:"\u2322",
fscr:"\u{1D4BB}",gE:"\u2267",gEl:"\u2A8C",gacute:"\u01F5",gamma:"\u03B3",gammad:"\u03DD",gap:"\u2A86",gbreve:"\u011F",gcirc:"\u011D",gcy:"\u0433",gdot:"\u0121",
ge:"\u2265",gel:"\u22DB",geq:"\u2265",geqq:"\u2267",geqslant:"\u2A7E",ges:"\u2A7E",gescc:"\u2AA9",gesdot:"\u2A80",gesdoto:"\u2A82",gesdotol:"\u2A84",gesl:"\u22DB\uFE00",
gesles:"\u2A94",gfr:"\u{1D524}",gg:"\u226B",ggg:"\u22D9",gimel:"\u2137",gjcy:"\u0453",gl:"\u2277",glE:"\u2A92",gla:"\u2AA5",glj:"\u2AA4",gnE:"\u2269",gnap:"\u2A8A",
gnapprox:"\u2A8A",gne:"\u2A88",gneq:"\u2A88",gneqq:"\u2269",gnsim:"\u22E7",gopf:"\u{1D558}",grave:"`",gscr:"\u210A",gsim:"\u2273",gsime:"\u2A8E",gsiml:"\u2A90",
gt:">",gtcc:"\u2AA7",gtcir:"\u2A7A",gtdot:"\u22D7",gtlPar:"\u2995",gtquest:"\u2A7C",gtrapprox:"\u2A86",gtrarr:"\u2978",gtrdot:"\u22D7",gtreqless:"\u22DB",gtreqqless:"\
\u2A8C",gtrless:"\u2277",gtrsim:"\u2273",gvertneqq:"\u2269\uFE00",gvnE:"\u2269\uFE00",hArr:"\u21D4",hairsp:"\u200A",half:"\xBD",hamilt:"\u210B",hardcy:"\u044A",
harr:"\u2194",harrcir:"\u2948",harrw:"\u21AD",hbar:"\u210F",hcirc:"\u0125",hearts:"\u2665",heartsuit:"\u2665",hellip:"\u2026",hercon:"\u22B9",hfr:"\u{1D525}",hksearow:"\
\u2925",hkswarow:"\u2926",hoarr:"\u21FF",homtht:"\u223B",hookleftarrow:"\u21A9",hookrightarrow:"\u21AA",hopf:"\u{1D559}",horbar:"\u2015",hscr:"\u{1D4BD}",hslash:"\
\u210F",hstrok:"\u0127",hybull:"\u2043",hyphen:"\u2010",iacute:"\xED",ic:"\u2063",icirc:"\xEE",icy:"\u0438",iecy:"\u0435",iexcl:"\xA1",iff:"\u21D4",ifr:"\u{1D526}",
igrave:"\xEC",ii:"\u2148",iiiint:"\u2A0C",iiint:"\u222D",iinfin:"\u29DC",iiota:"\u2129",ijlig:"\u0133",imacr:"\u012B",image:"\u2111",imagline:"\u2110",imagpart:"\
\u2111",imath:"\u0131",imof:"\u22B7",imped:"\u01B5",in:"\u2208",incare:"\u2105",infin:"\u221E",infintie:"\u29DD",inodot:"\u0131",int:"\u222B",intcal:"\u22BA",integers:"\
\u2124",intercal:"\u22BA",intlarhk:"\u2A17",intprod:"\u2A3C",iocy:"\u0451",iogon:"\u012F",iopf:"\u{1D55A}",iota:"\u03B9",iprod:"\u2A3C",iquest:"\xBF",iscr:"\u{1D4BE}",
isin:"\u2208",isinE:"\u22F9",isindot:"\u22F5",isins:"\u22F4",isinsv:"\u22F3",isinv:"\u2208",it:"\u2062",itilde:"\u0129",iukcy:"\u0456",iuml:"\xEF",jcirc:"\u0135",
jcy:"\u0439",jfr:"\u{1D527}",jmath:"\u0237",jopf:"\u{1D55B}",jscr:"\u{1D4BF}",jsercy:"\u0458",jukcy:"\u0454",kappa:"\u03BA",kappav:"\u03F0",kcedil:"\u0137",kcy:"\
\u043A",kfr:"\u{1D528}",kgreen:"\u0138",khcy:"\u0445",kjcy:"\u045C",kopf:"\u{1D55C}",kscr:"\u{1D4C0}",lAarr:"\u21DA",lArr:"\u21D0",lAtail:"\u291B",lBarr:"\u290E",
lE:"\u2266",lEg:"\u2A8B",lHar:"\u2962",lacute:"\u013A",laemptyv:"\u29B4",lagran:"\u2112",lambda:"\u03BB",lang:"\u27E8",langd:"\u2991",langle:"\u27E8",lap:"\u2A85",
laquo:"\xAB",larr:"\u2190",larrb:"\u21E4",larrbfs:"\u291F",larrfs:"\u291D",larrhk:"\u21A9",larrlp:"\u21AB",larrpl:"\u2939",larrsim:"\u2973",larrtl:"\u21A2",lat:"\
\u2AAB",latail:"\u2919",late:"\u2AAD",lates:"\u2AAD\uFE00",lbarr:"\u290C",lbbrk:"\u2772",lbrace:"{",lbrack:"[",lbrke:"\u298B",lbrksld:"\u298F",lbrkslu:"\u298D",
lcaron:"\u013E",lcedil:"\u013C",lceil:"\u2308",lcub:"{",lcy:"\u043B",ldca:"\u2936",ldquo:"\u201C",ldquor:"\u201E",ldrdhar:"\u2967",ldrushar:"\u294B",ldsh:"\u21B2",
le:"\u2264",leftarrow:"\u2190",leftarrowtail:"\u21A2",leftharpoondown:"\u21BD",leftharpoonup:"\u21BC",leftleftarrows:"\u21C7",leftrightarrow:"\u2194",leftrightarrows:"\
\u21C6",leftrightharpoons:"\u21CB",leftrightsquigarrow:"\u21AD",leftthreetimes:"\u22CB",leg:"\u22DA",leq:"\u2264",leqq:"\u2266",leqslant:"\u2A7D",les:"\u2A7D",lescc:"\
\u2AA8",lesdot:"\u2A7F",lesdoto:"\u2A81",lesdotor:"\u2A83",lesg:"\u22DA\uFE00",lesges:"\u2A93",lessapprox:"\u2A85",lessdot:"\u22D6",lesseqgtr:"\u22DA",lesseqqgtr:"\
\u2A8B",lessgtr:"\u2276",lesssim:"\u2272",lfisht:"\u297C",lfloor:"\u230A",lfr:"\u{1D529}",lg:"\u2276",lgE:"\u2A91",lhard:"\u21BD",lharu:"\u21BC",lharul:"\u296A",
lhblk:"\u2584",ljcy:"\u0459",ll:"\u226A",llarr:"\u21C7",llcorner:"\u231E",llhard:"\u296B",lltri:"\u25FA",lmidot:"\u0140",lmoust:"\u23B0",lmoustache:"\u23B0",lnE:"\
\u2268",lnap:"\u2A89",lnapprox:"\u2A89",lne:"\u2A87",lneq:"\u2A87",lneqq:"\u2268",lnsim:"\u22E6",loang:"\u27EC",loarr:"\u21FD",lobrk:"\u27E6",longleftarrow:"\u27F5",
longleftrightarrow:"\u27F7",longmapsto:"\u27FC",longrightarrow:"\u27F6",looparrowleft:"\u21AB",looparrowright:"\u21AC",lopar:"\u2985",lopf:"\u{1D55D}",loplus:"\u2A2D",
lotimes:"\u2A34",lowast:"\u2217",lowbar:"_",loz:"\u25CA",lozenge:"\u25CA",lozf:"\u29EB",lpar:"(",lparlt:"\u2993",lrarr:"\u21C6",lrcorner:"\u231F",lrhar:"\u21CB",
lrhard:"\u296D",lrm:"\u200E",lrtri:"\u22BF",lsaquo:"\u2039",lscr:"\u{1D4C1}",lsh:"\u21B0",lsim:"\u2272",lsime:"\u2A8D",lsimg:"\u2A8F",lsqb:"[",lsquo:"\u2018",lsquor:"\
\u201A",lstrok:"\u0142",lt:"<",ltcc:"\u2AA6",ltcir:"\u2A79",ltdot:"\u22D6",lthree:"\u22CB",ltimes:"\u22C9",ltlarr:"\u2976",ltquest:"\u2A7B",ltrPar:"\u2996",ltri:"\
\u25C3",ltrie:"\u22B4",ltrif:"\u25C2",lurdshar:"\u294A",luruhar:"\u2966",lvertneqq:"\u2268\uFE00",lvnE:"\u2268\uFE00",mDDot:"\u223A",macr:"\xAF",male:"\u2642",malt:"\
\u2720",maltese:"\u2720",map:"\u21A6",mapsto:"\u21A6",mapstodown:"\u21A7",mapstoleft:"\u21A4",mapstoup:"\u21A5",marker:"\u25AE",mcomma:"\u2A29",mcy:"\u043C",mdash:"\
\u2014",measuredangle:"\u2221",mfr:"\u{1D52A}",mho:"\u2127",micro:"\xB5",mid:"\u2223",midast:"*",midcir:"\u2AF0",middot:"\xB7",minus:"\u2212",minusb:"\u229F",minusd:"\
\u2238",minusdu:"\u2A2A",mlcp:"\u2ADB",mldr:"\u2026",mnplus:"\u2213",models:"\u22A7",mopf:"\u{1D55E}",mp:"\u2213",mscr:"\u{1D4C2}",mstpos:"\u223E",mu:"\u03BC",multimap:"\
\u22B8",mumap:"\u22B8",nGg:"\u22D9\u0338",nGt:"\u226B\u20D2",nGtv:"\u226B\u0338",nLeftarrow:"\u21CD",nLeftrightarrow:"\u21CE",nLl:"\u22D8\u0338",nLt:"\u226A\u20D2",
nLtv:"\u226A\u0338",nRightarrow:"\u21CF",nVDash:"\u22AF",nVdash:"\u22AE",nabla:"\u2207",nacute:"\u0144",nang:"\u2220\u20D2",nap:"\u2249",napE:"\u2A70\u0338",napid:"\
\u224B\u0338",napos:"\u0149",napprox:"\u2249",natur:"\u266E",natural:"\u266E",naturals:"\u2115",nbsp:"\xA0",nbump:"\u224E\u0338",nbumpe:"\u224F\u0338",ncap:"\u2A43",
ncaron:"\u0148",ncedil:"\u0146",ncong:"\u2247",ncongdot:"\u2A6D\u0338",ncup:"\u2A42",ncy:"\u043D",ndash:"\u2013",ne:"\u2260",neArr:"\u21D7",nearhk:"\u2924",nearr:"\
\u2197",nearrow:"\u2197",nedot:"\u2250\u0338",nequiv:"\u2262",nesear:"\u2928",nesim:"\u2242\u0338",nexist:"\u2204",nexists:"\u2204",nfr:"\u{1D52B}",ngE:"\u2267\u0338",
nge:"\u2271",ngeq:"\u2271",ngeqq:"\u2267\u0338",ngeqslant:"\u2A7E\u0338",nges:"\u2A7E\u0338",ngsim:"\u2275",ngt:"\u226F",ngtr:"\u226F",nhArr:"\u21CE",nharr:"\u21AE",
nhpar:"\u2AF2",ni:"\u220B",nis:"\u22FC",nisd:"\u22FA",niv:"\u220B",njcy:"\u045A",nlArr:"\u21CD",nlE:"\u2266\u0338",nlarr:"\u219A",nldr:"\u2025",nle:"\u2270",nleftarrow:"\
\u219A",nleftrightarrow:"\u21AE",nleq:"\u2270",nleqq:"\u2266\u0338",nleqslant:"\u2A7D\u0338",nles:"\u2A7D\u0338",nless:"\u226E",nlsim:"\u2274",nlt:"\u226E",nltri:"\
\u22EA",nltrie:"\u22EC",nmid:"\u2224",nopf:"\u{1D55F}",not:"\xAC",notin:"\u2209",notinE:"\u22F9\u0338",notindot:"\u22F5\u0338",notinva:"\u2209",notinvb:"\u22F7",
notinvc:"\u22F6",notni:"\u220C",notniva:"\u220C",notnivb:"\u22FE",notnivc:"\u22FD",npar:"\u2226",nparallel:"\u2226",nparsl:"\u2AFD\u20E5",npart:"\u2202\u0338",npolint:"\
\u2A14",npr:"\u2280",nprcue:"\u22E0",npre:"\u2AAF\u0338",nprec:"\u2280",npreceq:"\u2AAF\u0338",nrArr:"\u21CF",nrarr:"\u219B",nrarrc:"\u2933\u0338",nrarrw:"\u219D\u0338",
nrightarrow:"\u219B",nrtri:"\u22EB",nrtrie:"\u22ED",nsc:"\u2281",nsccue:"\u22E1",nsce:"\u2AB0\u0338",nscr:"\u{1D4C3}",nshortmid:"\u2224",nshortparallel:"\u2226",
nsim:"\u2241",nsime:"\u2244",nsimeq:"\u2244",nsmid:"\u2224",nspar:"\u2226",nsqsube:"\u22E2",nsqsupe:"\u22E3",nsub:"\u2284",nsubE:"\u2AC5\u0338",nsube:"\u2288",nsubset:"\
\u2282\u20D2",nsubseteq:"\u2288",nsubseteqq:"\u2AC5\u0338",nsucc:"\u2281",nsucceq:"\u2AB0\u0338",nsup:"\u2285",nsupE:"\u2AC6\u0338",nsupe:"\u2289",nsupset:"\u2283\u20D2",
nsupseteq:"\u2289",nsupseteqq:"\u2AC6\u0338",ntgl:"\u2279",ntilde:"\xF1",ntlg:"\u2278",ntriangleleft:"\u22EA",ntrianglelefteq:"\u22EC",ntriangleright:"\u22EB",ntrianglerighteq:"\
\u22ED",nu:"\u03BD",num:"#",numero:"\u2116",numsp:"\u2007",nvDash:"\u22AD",nvHarr:"\u2904",nvap:"\u224D\u20D2",nvdash:"\u22AC",nvge:"\u2265\u20D2",nvgt:">\u20D2",
nvinfin:"\u29DE",nvlArr:"\u2902",nvle:"\u2264\u20D2",nvlt:"<\u20D2",nvltrie:"\u22B4\u20D2",nvrArr:"\u2903",nvrtrie:"\u22B5\u20D2",nvsim:"\u223C\u20D2",nwArr:"\u21D6",
nwarhk:"\u2923",nwarr:"\u2196",nwarrow:"\u2196",nwnear:"\u2927",oS:"\u24C8",oacute:"\xF3",oast:"\u229B",ocir:"\u229A",ocirc:"\xF4",ocy:"\u043E",odash:"\u229D",odblac:"\
\u0151",odiv:"\u2A38",odot:"\u2299",odsold:"\u29BC",oelig:"\u0153",ofcir:"\u29BF",ofr:"\u{1D52C}",ogon:"\u02DB",ograve:"\xF2",ogt:"\u29C1",ohbar:"\u29B5",ohm:"\u03A9",
oint:"\u222E",olarr:"\u21BA",olcir:"\u29BE",olcross:"\u29BB",oline:"\u203E",olt:"\u29C0",omacr:"\u014D",omega:"\u03C9",omicron:"\u03BF",omid:"\u29B6",ominus:"\u2296",
oopf:"\u{1D560}",opar:"\u29B7",operp:"\u29B9",oplus:"\u2295",or:"\u2228",orarr:"\u21BB",ord:"\u2A5D",order:"\u2134",orderof:"\u2134",ordf:"\xAA",ordm:"\xBA",origof:"\
\u22B6",oror:"\u2A56",orslope:"\u2A57",orv:"\u2A5B",oscr:"\u2134",oslash:"\xF8",osol:"\u2298",otilde:"\xF5",otimes:"\u2297",otimesas:"\u2A36",ouml:"\xF6",ovbar:"\
\u233D",par:"\u2225",para:"\xB6",parallel:"\u2225",parsim:"\u2AF3",parsl:"\u2AFD",part:"\u2202",pcy:"\u043F",percnt:"%",period:".",permil:"\u2030",perp:"\u22A5",
pertenk:"\u2031",pfr:"\u{1D52D}",phi:"\u03C6",phiv:"\u03D5",phmmat:"\u2133",phone:"\u260E",pi:"\u03C0",pitchfork:"\u22D4",piv:"\u03D6",planck:"\u210F",planckh:"\
\u210E",plankv:"\u210F",plus:"+",plusacir:"\u2A23",plusb:"\u229E",pluscir:"\u2A22",plusdo:"\u2214",plusdu:"\u2A25",pluse:"\u2A72",plusmn:"\xB1",plussim:"\u2A26",
plustwo:"\u2A27",pm:"\xB1",pointint:"\u2A15",popf:"\u{1D561}",pound:"\xA3",pr:"\u227A",prE:"\u2AB3",prap:"\u2AB7",prcue:"\u227C",pre:"\u2AAF",prec:"\u227A",precapprox:"\
\u2AB7",preccurlyeq:"\u227C",preceq:"\u2AAF",precnapprox:"\u2AB9",precneqq:"\u2AB5",precnsim:"\u22E8",precsim:"\u227E",prime:"\u2032",primes:"\u2119",prnE:"\u2AB5",
prnap:"\u2AB9",prnsim:"\u22E8",prod:"\u220F",profalar:"\u232E",profline:"\u2312",profsurf:"\u2313",prop:"\u221D",propto:"\u221D",prsim:"\u227E",prurel:"\u22B0",
pscr:"\u{1D4C5}",psi:"\u03C8",puncsp:"\u2008",qfr:"\u{1D52E}",qint:"\u2A0C",qopf:"\u{1D562}",qprime:"\u2057",qscr:"\u{1D4C6}",quaternions:"\u210D",quatint:"\u2A16",
quest:"?",questeq:"\u225F",quot:'"',rAarr:"\u21DB",rArr:"\u21D2",rAtail:"\u291C",rBarr:"\u290F",rHar:"\u2964",race:"\u223D\u0331",racute:"\u0155",radic:"\u221A",
raemptyv:"\u29B3",rang:"\u27E9",rangd:"\u2992",range:"\u29A5",rangle:"\u27E9",raquo:"\xBB",rarr:"\u2192",rarrap:"\u2975",rarrb:"\u21E5",rarrbfs:"\u2920",rarrc:"\
\u2933",rarrfs:"\u291E",rarrhk:"\u21AA",rarrlp:"\u21AC",rarrpl:"\u2945",rarrsim:"\u2974",rarrtl:"\u21A3",rarrw:"\u219D",ratail:"\u291A",ratio:"\u2236",rationals:"\
\u211A",rbarr:"\u290D",rbbrk:"\u2773",rbrace:"}",rbrack:"]",rbrke:"\u298C",rbrksld:"\u298E",rbrkslu:"\u2990",rcaron:"\u0159",rcedil:"\u0157",rceil:"\u2309",rcub:"\
}",rcy:"\u0440",rdca:"\u2937",rdldhar:"\u2969",rdquo:"\u201D",rdquor:"\u201D",rdsh:"\u21B3",real:"\u211C",realine:"\u211B",realpart:"\u211C",reals:"\u211D",rect:"\
\u25AD",reg:"\xAE",rfisht:"\u297D",rfloor:"\u230B",rfr:"\u{1D52F}",rhard:"\u21C1",rharu:"\u21C0",rharul:"\u296C",rho:"\u03C1",rhov:"\u03F1",rightarrow:"\u2192",
rightarrowtail:"\u21A3",rightharpoondown:"\u21C1",rightharpoonup:"\u21C0",rightleftarrows:"\u21C4",rightleftharpoons:"\u21CC",rightrightarrows:"\u21C9",rightsquigarrow:"\
\u219D",rightthreetimes:"\u22CC",ring:"\u02DA",risingdotseq:"\u2253",rlarr:"\u21C4",rlhar:"\u21CC",rlm:"\u200F",rmoust:"\u23B1",rmoustache:"\u23B1",rnmid:"\u2AEE",
roang:"\u27ED",roarr:"\u21FE",robrk:"\u27E7",ropar:"\u2986",ropf:"\u{1D563}",roplus:"\u2A2E",rotimes:"\u2A35",rpar:")",rpargt:"\u2994",rppolint:"\u2A12",rrarr:"\
\u21C9",rsaquo:"\u203A",rscr:"\u{1D4C7}",rsh:"\u21B1",rsqb:"]",rsquo:"\u2019",rsquor:"\u2019",rthree:"\u22CC",rtimes:"\u22CA",rtri:"\u25B9",rtrie:"\u22B5",rtrif:"\
\u25B8",rtriltri:"\u29CE",ruluhar:"\u2968",rx:"\u211E",sacute:"\u015B",sbquo:"\u201A",sc:"\u227B",scE:"\u2AB4",scap:"\u2AB8",scaron:"\u0161",sccue:"\u227D",sce:"\
\u2AB0",scedil:"\u015F",scirc:"\u015D",scnE:"\u2AB6",scnap:"\u2ABA",scnsim:"\u22E9",scpolint:"\u2A13",scsim:"\u227F",scy:"\u0441",sdot:"\u22C5",sdotb:"\u22A1",sdote:"\
\u2A66",seArr:"\u21D8",searhk:"\u2925",searr:"\u2198",searrow:"\u2198",sect:"\xA7",semi:";",seswar:"\u2929",setminus:"\u2216",setmn:"\u2216",sext:"\u2736",sfr:"\
\u{1D530}",sfrown:"\u2322",sharp:"\u266F",shchcy:"\u0449",shcy:"\u0448",shortmid:"\u2223",shortparallel:"\u2225",shy:"\xAD",sigma:"\u03C3",sigmaf:"\u03C2",sigmav:"\
\u03C2",sim:"\u223C",simdot:"\u2A6A",sime:"\u2243",simeq:"\u2243",simg:"\u2A9E",simgE:"\u2AA0",siml:"\u2A9D",simlE:"\u2A9F",simne:"\u2246",simplus:"\u2A24",simrarr:"\
\u2972",slarr:"\u2190",smallsetminus:"\u2216",smashp:"\u2A33",smeparsl:"\u29E4",smid:"\u2223",smile:"\u2323",smt:"\u2AAA",smte:"\u2AAC",smtes:"\u2AAC\uFE00",softcy:"\
\u044C",sol:"/",solb:"\u29C4",solbar:"\u233F",sopf:"\u{1D564}",spades:"\u2660",spadesuit:"\u2660",spar:"\u2225",sqcap:"\u2293",sqcaps:"\u2293\uFE00",sqcup:"\u2294",
sqcups:"\u2294\uFE00",sqsub:"\u228F",sqsube:"\u2291",sqsubset:"\u228F",sqsubseteq:"\u2291",sqsup:"\u2290",sqsupe:"\u2292",sqsupset:"\u2290",sqsupseteq:"\u2292",
squ:"\u25A1",square:"\u25A1",squarf:"\u25AA",squf:"\u25AA",srarr:"\u2192",sscr:"\u{1D4C8}",ssetmn:"\u2216",ssmile:"\u2323",sstarf:"\u22C6",star:"\u2606",starf:"\
\u2605",straightepsilon:"\u03F5",straightphi:"\u03D5",strns:"\xAF",sub:"\u2282",subE:"\u2AC5",subdot:"\u2ABD",sube:"\u2286",subedot:"\u2AC3",submult:"\u2AC1",subnE:"\
\u2ACB",subne:"\u228A",subplus:"\u2ABF",subrarr:"\u2979",subset:"\u2282",subseteq:"\u2286",subseteqq:"\u2AC5",subsetneq:"\u228A",subsetneqq:"\u2ACB",subsim:"\u2AC7",
subsub:"\u2AD5",subsup:"\u2AD3",succ:"\u227B",succapprox:"\u2AB8",succcurlyeq:"\u227D",succeq:"\u2AB0",succnapprox:"\u2ABA",succneqq:"\u2AB6",succnsim:"\u22E9",
succsim:"\u227F",sum:"\u2211",sung:"\u266A",sup1:"\xB9",sup2:"\xB2",sup3:"\xB3",sup:"\u2283",supE:"\u2AC6",supdot:"\u2ABE",supdsub:"\u2AD8",supe:"\u2287",supedot:"\
\u2AC4",suphsol:"\u27C9",suphsub:"\u2AD7",suplarr:"\u297B",supmult:"\u2AC2",supnE:"\u2ACC",supne:"\u228B",supplus:"\u2AC0",supset:"\u2283",supseteq:"\u2287",supseteqq:"\
\u2AC6",supsetneq:"\u228B",supsetneqq:"\u2ACC",supsim:"\u2AC8",supsub:"\u2AD4",supsup:"\u2AD6",swArr:"\u21D9",swarhk:"\u2926",swarr:"\u2199",swarrow:"\u2199",swnwar:"\
\u292A",szlig:"\xDF",target:"\u2316",tau:"\u03C4",tbrk:"\u23B4",tcaron:"\u0165",tcedil:"\u0163",tcy:"\u0442",tdot:"\u20DB",telrec:"\u2315",tfr:"\u{1D531}",there4:"\
\u2234",therefore:"\u2234",theta:"\u03B8",thetasym:"\u03D1",thetav:"\u03D1",thickapprox:"\u2248",thicksim:"\u223C",thinsp:"\u2009",thkap:"\u2248",thksim:"\u223C",
thorn:"\xFE",tilde:"\u02DC",times:"\xD7",timesb:"\u22A0",timesbar:"\u2A31",timesd:"\u2A30",tint:"\u222D",toea:"\u2928",top:"\u22A4",topbot:"\u2336",topcir:"\u2AF1",
topf:"\u{1D565}",topfork:"\u2ADA",tosa:"\u2929",tprime:"\u2034",trade:"\u2122",triangle:"\u25B5",triangledown:"\u25BF",triangleleft:"\u25C3",trianglelefteq:"\u22B4",
triangleq:"\u225C",triangleright:"\u25B9",trianglerighteq:"\u22B5",tridot:"\u25EC",trie:"\u225C",triminus:"\u2A3A",triplus:"\u2A39",trisb:"\u29CD",tritime:"\u2A3B",
trpezium:"\u23E2",tscr:"\u{1D4C9}",tscy:"\u0446",tshcy:"\u045B",tstrok:"\u0167",twixt:"\u226C",twoheadleftarrow:"\u219E",twoheadrightarrow:"\u21A0",uArr:"\u21D1",
uHar:"\u2963",uacute:"\xFA",uarr:"\u2191",ubrcy:"\u045E",ubreve:"\u016D",ucirc:"\xFB",ucy:"\u0443",udarr:"\u21C5",udblac:"\u0171",udhar:"\u296E",ufisht:"\u297E",
ufr:"\u{1D532}",ugrave:"\xF9",uharl:"\u21BF",uharr:"\u21BE",uhblk:"\u2580",ulcorn:"\u231C",ulcorner:"\u231C",ulcrop:"\u230F",ultri:"\u25F8",umacr:"\u016B",uml:"\
\xA8",uogon:"\u0173",uopf:"\u{1D566}",uparrow:"\u2191",updownarrow:"\u2195",upharpoonleft:"\u21BF",upharpoonright:"\u21BE",uplus:"\u228E",upsi:"\u03C5",upsih:"\u03D2",
upsilon:"\u03C5",upuparrows:"\u21C8",urcorn:"\u231D",urcorner:"\u231D",urcrop:"\u230E",uring:"\u016F",urtri:"\u25F9",uscr:"\u{1D4CA}",utdot:"\u22F0",utilde:"\u0169",
utri:"\u25B5",utrif:"\u25B4",uuarr:"\u21C8",uuml:"\xFC",uwangle:"\u29A7",vArr:"\u21D5",vBar:"\u2AE8",vBarv:"\u2AE9",vDash:"\u22A8",vangrt:"\u299C",varepsilon:"\u03F5",
varkappa:"\u03F0",varnothing:"\u2205",varphi:"\u03D5",varpi:"\u03D6",varpropto:"\u221D",varr:"\u2195",varrho:"\u03F1",varsigma:"\u03C2",varsubsetneq:"\u228A\uFE00",
varsubsetneqq:"\u2ACB\uFE00",varsupsetneq:"\u228B\uFE00",varsupsetneqq:"\u2ACC\uFE00",vartheta:"\u03D1",vartriangleleft:"\u22B2",vartriangleright:"\u22B3",vcy:"\
\u0432",vdash:"\u22A2",vee:"\u2228",veebar:"\u22BB",veeeq:"\u225A",vellip:"\u22EE",verbar:"|",vert:"|",vfr:"\u{1D533}",vltri:"\u22B2",vnsub:"\u2282\u20D2",vnsup:"\
\u2283\u20D2",vopf:"\u{1D567}",vprop:"\u221D",vrtri:"\u22B3",vscr:"\u{1D4CB}",vsubnE:"\u2ACB\uFE00",vsubne:"\u228A\uFE00",vsupnE:"\u2ACC\uFE00",vsupne:"\u228B\uFE00",
vzigzag:"\u299A",wcirc:"\u0175",wedbar:"\u2A5F",wedge:"\u2227",wedgeq:"\u2259",weierp:"\u2118",wfr:"\u{1D534}",wopf:"\u{1D568}",wp:"\u2118",wr:"\u2240",wreath:"\
\u2240",wscr:"\u{1D4CC}",xcap:"\u22C2",xcirc:"\u25EF",xcup:"\u22C3",xdtri:"\u25BD",xfr:"\u{1D535}",xhArr:"\u27FA",xharr:"\u27F7",xi:"\u03BE",xlArr:"\u27F8",xlarr:"\
\u27F5",xmap:"\u27FC",xnis:"\u22FB",xodot:"\u2A00",xopf:"\u{1D569}",xoplus:"\u2A01",xotime:"\u2A02",xrArr:"\u27F9",xrarr:"\u27F6",xscr:"\u{1D4CD}",xsqcup:"\u2A06",
xuplus:"\u2A04",xutri:"\u25B3",xvee:"\u22C1",xwedge:"\u22C0",yacute:"\xFD",yacy:"\u044F",ycirc:"\u0177",ycy:"\u044B",yen:"\xA5",yfr:"\u{1D536}",yicy:"\u0457",yopf:"\
\u{1D56A}",yscr:"\u{1D4CE}",yucy:"\u044E",yuml:"\xFF",zacute:"\u017A",zcaron:"\u017E",zcy:"\u0437",zdot:"\u017C",zeetrf:"\u2128",zeta:"\u03B6",zfr:"\u{1D537}",zhcy:"\
\u0436",zigrarr:"\u21DD",zopf:"\u{1D56B}",zscr:"\u{1D4CF}",zwj:"\u200D",zwnj:"\u200C"};var du={}.hasOwnProperty;function zt(e){return du.call(Ar,e)?Ar[e]:!1}function Re(e,t,n,r){let i=e.length,o=0,a;if(t<0?t=-t>i?0:i+t:t=t>i?i:t,n=n>0?n:0,r.length<1e4)a=Array.from(r),a.unshift(t,n),e.splice(...a);else for(n&&e.splice(
t,n);o<r.length;)a=r.slice(o,o+1e4),a.unshift(t,0),e.splice(...a),o+=1e4,t+=1e4}function Fe(e,t){return e.length>0?(Re(e,e.length,0,t),e):t}var xo={}.hasOwnProperty;function Rn(e){let t={},n=-1;for(;++n<e.length;)pu(t,e[n]);return t}function pu(e,t){let n;for(n in t){let i=(xo.call(e,n)?e[n]:void 0)||
(e[n]={}),o=t[n],a;if(o)for(a in o){xo.call(i,a)||(i[a]=[]);let l=o[a];mu(i[a],Array.isArray(l)?l:l?[l]:[])}}}function mu(e,t){let n=-1,r=[];for(;++n<t.length;)
(t[n].add==="after"?e:r).push(t[n]);Re(e,0,0,r)}function Dn(e,t){let n=Number.parseInt(e,t);return n<9||n===11||n>13&&n<32||n>126&&n<160||n>55295&&n<57344||n>64975&&n<65008||(n&65535)===65535||(n&65535)===65534||
n>1114111?"\uFFFD":String.fromCodePoint(n)}function Me(e){return e.replace(/[\t\n\r ]+/g," ").replace(/^ | $/g,"").toLowerCase().toUpperCase()}var Ce=gt(/[A-Za-z]/),Oe=gt(/[\dA-Za-z]/),yo=gt(/[#-'*+\--9=?A-Z^-~]/);function Et(e){return e!==null&&(e<32||e===127)}var rn=gt(/\d/),wo=gt(/[\dA-Fa-f]/),_o=gt(
/[!-/:-@[-`{-~]/);function $(e){return e!==null&&e<-2}function ce(e){return e!==null&&(e<0||e===32)}function te(e){return e===-2||e===-1||e===32}var ft=gt(/\p{P}|\p{S}/u),
tt=gt(/\s/);function gt(e){return t;function t(n){return n!==null&&n>-1&&e.test(String.fromCharCode(n))}}function ee(e,t,n,r){let i=r?r-1:1/0,o=0;return a;function a(u){return te(u)?(e.enter(n),l(u)):t(u)}function l(u){return te(u)&&o++<i?(e.consume(u),l):(e.exit(n),
t(u))}}function Tr(e,t,n,r,i,o){let a=0;return l;function l(p){return o>0&&te(p)?(e.enter(r),u(p)):d(p)}function u(p){return te(p)&&a<o?(e.consume(p),a++,u):(e.
exit(r),d(p))}function d(p){return a>=i?t(p):n(p)}}var Eo={tokenize:hu};function hu(e){let t=e.attempt(this.parser.constructs.contentInitial,r,i),n;return t;function r(l){if(l===null){e.consume(l);return}return e.
enter("lineEnding"),e.consume(l),e.exit("lineEnding"),ee(e,t,"linePrefix")}function i(l){return e.enter("paragraph"),o(l)}function o(l){let u=e.enter("chunkText",
{contentType:"text",previous:n});return n&&(n.next=u),n=u,a(l)}function a(l){if(l===null){e.exit("chunkText"),e.exit("paragraph"),e.consume(l);return}return $(l)?
(e.consume(l),e.exit("chunkText"),o):(e.consume(l),a)}}var ut=class{constructor(){this.index=new Map,this.map=[]}add(t,n,r){ko(this,t,n,r,!1)}addBefore(t,n,r){ko(this,t,n,r,!0)}consume(t){if(this.map.sort(function(o,a){
return o[0]-a[0]}),this.map.length===0)return;let n=this.map.length,r=[];for(;n>0;)n-=1,r.push(t.slice(this.map[n][0]+this.map[n][1]),this.map[n][2]),t.length=this.
map[n][0];r.push(t.slice()),t.length=0;let i=r.pop();for(;i;){for(let o of i)t.push(o);i=r.pop()}this.map.length=0,this.index.clear()}};function ko(e,t,n,r,i){if(n===
0&&r.length===0)return;let o=e.index.get(t);if(o){o[1]+=n,i?(r.push(...o[2]),o[2]=r):o[2].push(...r);return}let a=[t,n,r];e.map.push(a),e.index.set(t,a)}var vo={tokenize:fu},So={tokenize:gu};function fu(e){let t=this,n=[],r=0,i,o,a;return l;function l(D){if(r<n.length){let q=n[r];return t.containerState=q[1],e.attempt(
q[0].continuation,u,d)(D)}return d(D)}function u(D){if(r++,t.containerState._closeFlow){t.containerState._closeFlow=void 0,i&&v();let q=t.events.length,z=q,A;for(;z--;)
if(t.events[z][0]==="exit"&&t.events[z][1].type==="chunkFlow"){A=t.events[z][1].end;break}E(r);let Z=q;for(;Z<t.events.length;)t.events[Z][1].end={...A},Z++;let Y=new ut;
return Y.add(z+1,0,t.events.slice(q)),Y.add(q,Z-q,[]),Y.consume(t.events),d(D)}return l(D)}function d(D){if(r===n.length){if(!i)return h(D);if(i.currentConstruct&&
i.currentConstruct.concrete)return _(D);t.interrupt=!!(i.currentConstruct&&!i._gfmTableDynamicInterruptHack)}return t.containerState={},e.check(So,p,m)(D)}function p(D){
return i&&v(),E(r),h(D)}function m(D){return t.parser.lazy[t.now().line]=r!==n.length,a=t.now().offset,_(D)}function h(D){return t.containerState={},e.attempt(So,
f,_)(D)}function f(D){return r++,n.push([t.currentConstruct,t.containerState]),h(D)}function _(D){if(D===null){i&&v(),E(0),e.consume(D);return}return i=i||t.parser.
flow(t.now()),e.enter("chunkFlow",{_tokenizer:i,contentType:"flow",previous:o}),C(D)}function C(D){if(D===null){T(e.exit("chunkFlow"),!0),E(0),e.consume(D);return}
return $(D)?(e.consume(D),T(e.exit("chunkFlow")),r=0,t.interrupt=void 0,l):(e.consume(D),C)}function T(D,q){let z=t.sliceStream(D);if(q&&z.push(null),D.previous=
o,o&&(o.next=D),o=D,i.defineSkip(D.start),i.write(z),t.parser.lazy[D.start.line]){let A=i.events.length;for(;A--;)if(i.events[A][1].start.offset<a&&(!i.events[A][1].
end||i.events[A][1].end.offset>a))return;let Z=t.events.length,Y=Z,X,O;for(;Y--;)if(t.events[Y][0]==="exit"&&t.events[Y][1].type==="chunkFlow"){if(X){O=t.events[Y][1].
end;break}X=!0}for(E(r),A=Z;A<t.events.length;)t.events[A][1].end={...O},A++;let oe=new ut;oe.add(Y+1,0,t.events.slice(Z)),oe.add(Z,A-Z,[]),oe.consume(t.events)}}
function E(D){let q=n.length;for(;q-- >D;){let z=n[q];t.containerState=z[1],z[0].exit.call(t,e)}n.length=D}function v(){i.write([null]),o=void 0,i=void 0,t.containerState.
_closeFlow=void 0}}function gu(e,t,n){return ee(e,e.attempt(this.parser.constructs.document,t,n),"linePrefix",this.parser.constructs.disable.null.includes("code\
Indented")?void 0:4)}function Ut(e){if(e===null||ce(e)||tt(e))return 1;if(ft(e))return 2}function bt(e,t,n){let r=[],i=-1;for(;++i<e.length;){let o=e[i].resolveAll;o&&!r.includes(o)&&(t=o(t,n),r.push(o))}return t}var an={name:"attention",resolveAll:bu,tokenize:xu};function bu(e,t){let n=-1,r;for(;++n<e.length;)if(e[n][0]==="enter"&&e[n][1].type==="attentionSequence"&&e[n][1].
_close){let i=n;for(;i--;)if(e[i][0]==="exit"&&e[i][1].type==="attentionSequence"&&e[i][1]._open&&t.sliceSerialize(e[i][1]).charCodeAt(0)===t.sliceSerialize(e[n][1]).
charCodeAt(0)){if((e[i][1]._close||e[n][1]._open)&&(e[n][1].end.offset-e[n][1].start.offset)%3&&!((e[i][1].end.offset-e[i][1].start.offset+e[n][1].end.offset-e[n][1].
start.offset)%3))continue;let o=e[i][1].end.offset-e[i][1].start.offset>1&&e[n][1].end.offset-e[n][1].start.offset>1?2:1,a={...e[i][1].end},l={...e[n][1].start};
Ao(a,-o),Ao(l,o);let u={type:o>1?"strongSequence":"emphasisSequence",start:a,end:{...e[i][1].end}},d={type:o>1?"strongSequence":"emphasisSequence",start:{...e[n][1].
start},end:l},p={type:o>1?"strongText":"emphasisText",start:{...e[i][1].end},end:{...e[n][1].start}},m={type:o>1?"strong":"emphasis",start:{...u.start},end:{...d.
end}};e[i][1].end={...u.start},e[n][1].start={...d.end},r=[],e[i][1].end.offset-e[i][1].start.offset&&(r=Fe(r,[["enter",e[i][1],t],["exit",e[i][1],t]])),r=Fe(r,
[["enter",m,t],["enter",u,t],["exit",u,t],["enter",p,t]]),r=Fe(r,bt(t.parser.constructs.insideSpan.null,e.slice(i+1,n),t)),r=Fe(r,[["exit",p,t],["enter",d,t],["\
exit",d,t],["exit",m,t]]);let h=0;e[n][1].end.offset-e[n][1].start.offset&&(h=2,r=Fe(r,[["enter",e[n][1],t],["exit",e[n][1],t]])),Re(e,i-1,n-i+3,r),n=i+r.length-
h-2;break}}for(n=-1;++n<e.length;)e[n][1].type==="attentionSequence"&&(e[n][1].type="data");return e}function xu(e,t){let n=this.parser.constructs.attentionMarkers.
null,r=this.previous,i=Ut(r),o;return a;function a(u){return o=u,e.enter("attentionSequence"),l(u)}function l(u){if(u===o)return e.consume(u),l;let d=e.exit("at\
tentionSequence"),p=Ut(u),m=!p||p===2&&i||n.includes(u)&&u!==42&&u!==95,h=!i||i===2&&p||n.includes(r)&&r!==42&&r!==95;return d._open=!!(o===42?m:m&&(i||!h)),d._close=
!!(o===42?h:h&&(p||!m)),t(u)}}function Ao(e,t){e.column+=t,e.offset+=t,e._bufferIndex+=t}var Nr={name:"autolink",tokenize:yu};function yu(e,t,n){let r=0;return i;function i(f){return e.enter("autolink"),e.enter("autolinkMarker"),e.consume(f),e.exit(
"autolinkMarker"),e.enter("autolinkProtocol"),o}function o(f){return Ce(f)?(e.consume(f),a):f===64?n(f):d(f)}function a(f){return f===43||f===45||f===46||Oe(f)?
(r=1,l(f)):d(f)}function l(f){return f===58?(e.consume(f),r=0,u):(f===43||f===45||f===46||Oe(f))&&r++<32?(e.consume(f),l):(r=0,d(f))}function u(f){return f===62?
(e.exit("autolinkProtocol"),e.enter("autolinkMarker"),e.consume(f),e.exit("autolinkMarker"),e.exit("autolink"),t):f===null||f===32||f===60||Et(f)?n(f):(e.consume(
f),u)}function d(f){return f===64?(e.consume(f),p):yo(f)?(e.consume(f),d):n(f)}function p(f){return Oe(f)?m(f):n(f)}function m(f){return f===46?(e.consume(f),r=
0,p):f===62?(e.exit("autolinkProtocol").type="autolinkEmail",e.enter("autolinkMarker"),e.consume(f),e.exit("autolinkMarker"),e.exit("autolink"),t):h(f)}function h(f){
if((f===45||Oe(f))&&r++<63){let _=f===45?h:m;return e.consume(f),_}return n(f)}}var nt={partial:!0,tokenize:wu};function wu(e,t,n){return r;function r(o){return te(o)?ee(e,i,"linePrefix")(o):i(o)}function i(o){return o===null||$(o)?t(o):n(o)}}var Mn={continuation:{tokenize:Eu},exit:ku,name:"blockQuote",tokenize:_u};function _u(e,t,n){let r=this;return i;function i(a){if(a===62){let l=r.containerState;
return l.open||(e.enter("blockQuote",{_container:!0}),l.open=!0),e.enter("blockQuotePrefix"),e.enter("blockQuoteMarker"),e.consume(a),e.exit("blockQuoteMarker"),
o}return n(a)}function o(a){return te(a)?(e.enter("blockQuotePrefixWhitespace"),e.consume(a),e.exit("blockQuotePrefixWhitespace"),e.exit("blockQuotePrefix"),t):
(e.exit("blockQuotePrefix"),t(a))}}function Eu(e,t,n){let r=this;return i;function i(a){return te(a)?ee(e,o,"linePrefix",r.parser.constructs.disable.null.includes(
"codeIndented")?void 0:4)(a):o(a)}function o(a){return e.attempt(Mn,t,n)(a)}}function ku(e){e.exit("blockQuote")}var Ln={name:"characterEscape",tokenize:Su};function Su(e,t,n){return r;function r(o){return e.enter("characterEscape"),e.enter("escapeMarker"),e.consume(o),e.exit(
"escapeMarker"),i}function i(o){return _o(o)?(e.enter("characterEscapeValue"),e.consume(o),e.exit("characterEscapeValue"),e.exit("characterEscape"),t):n(o)}}var Bn={name:"characterReference",tokenize:vu};function vu(e,t,n){let r=this,i=0,o,a;return l;function l(m){return e.enter("characterReference"),e.enter("charac\
terReferenceMarker"),e.consume(m),e.exit("characterReferenceMarker"),u}function u(m){return m===35?(e.enter("characterReferenceMarkerNumeric"),e.consume(m),e.exit(
"characterReferenceMarkerNumeric"),d):(e.enter("characterReferenceValue"),o=31,a=Oe,p(m))}function d(m){return m===88||m===120?(e.enter("characterReferenceMarke\
rHexadecimal"),e.consume(m),e.exit("characterReferenceMarkerHexadecimal"),e.enter("characterReferenceValue"),o=6,a=wo,p):(e.enter("characterReferenceValue"),o=7,
a=rn,p(m))}function p(m){if(m===59&&i){let h=e.exit("characterReferenceValue");return a===Oe&&!zt(r.sliceSerialize(h))?n(m):(e.enter("characterReferenceMarker"),
e.consume(m),e.exit("characterReferenceMarker"),e.exit("characterReference"),t)}return a(m)&&i++<o?(e.consume(m),p):n(m)}}var on={partial:!0,tokenize:Au};function Au(e,t,n){let r=this;return i;function i(a){return a===null?n(a):(e.enter("lineEnding"),e.consume(a),e.exit("lineEnding"),
o)}function o(a){return r.parser.lazy[r.now().line]?n(a):t(a)}}var qn={concrete:!0,name:"codeFenced",tokenize:Tu};function Tu(e,t,n){let r=this,i={partial:!0,tokenize:z},o=0,a=0,l;return u;function u(A){return d(A)}function d(A){
let Z=r.events[r.events.length-1];return o=Z&&Z[1].type==="linePrefix"?Z[2].sliceSerialize(Z[1],!0).length:0,l=A,e.enter("codeFenced"),e.enter("codeFencedFence"),
e.enter("codeFencedFenceSequence"),p(A)}function p(A){return A===l?(a++,e.consume(A),p):a<3?n(A):(e.exit("codeFencedFenceSequence"),te(A)?ee(e,m,"whitespace")(A):
m(A))}function m(A){return A===null||$(A)?(e.exit("codeFencedFence"),r.interrupt?t(A):e.check(on,C,q)(A)):(e.enter("codeFencedFenceInfo"),e.enter("chunkString",
{contentType:"string"}),h(A))}function h(A){return A===null||$(A)?(e.exit("chunkString"),e.exit("codeFencedFenceInfo"),m(A)):te(A)?(e.exit("chunkString"),e.exit(
"codeFencedFenceInfo"),ee(e,f,"whitespace")(A)):A===96&&A===l?n(A):(e.consume(A),h)}function f(A){return A===null||$(A)?m(A):(e.enter("codeFencedFenceMeta"),e.enter(
"chunkString",{contentType:"string"}),_(A))}function _(A){return A===null||$(A)?(e.exit("chunkString"),e.exit("codeFencedFenceMeta"),m(A)):A===96&&A===l?n(A):(e.
consume(A),_)}function C(A){return e.attempt(i,q,T)(A)}function T(A){return e.enter("lineEnding"),e.consume(A),e.exit("lineEnding"),E}function E(A){return o>0&&
te(A)?ee(e,v,"linePrefix",o+1)(A):v(A)}function v(A){return A===null||$(A)?e.check(on,C,q)(A):(e.enter("codeFlowValue"),D(A))}function D(A){return A===null||$(A)?
(e.exit("codeFlowValue"),v(A)):(e.consume(A),D)}function q(A){return e.exit("codeFenced"),t(A)}function z(A,Z,Y){let X=0;return O;function O(Q){return A.enter("\
lineEnding"),A.consume(Q),A.exit("lineEnding"),oe}function oe(Q){return A.enter("codeFencedFence"),te(Q)?ee(A,ie,"linePrefix",r.parser.constructs.disable.null.includes(
"codeIndented")?void 0:4)(Q):ie(Q)}function ie(Q){return Q===l?(A.enter("codeFencedFenceSequence"),W(Q)):Y(Q)}function W(Q){return Q===l?(X++,A.consume(Q),W):X>=
a?(A.exit("codeFencedFenceSequence"),te(Q)?ee(A,j,"whitespace")(Q):j(Q)):Y(Q)}function j(Q){return Q===null||$(Q)?(A.exit("codeFencedFence"),Z(Q)):Y(Q)}}}var sn={name:"codeIndented",tokenize:Cu},Nu={partial:!0,tokenize:Ou};function Cu(e,t,n){return r;function r(l){return e.enter("codeIndented"),Tr(e,i,n,"linePref\
ix",4,4)(l)}function i(l){return l===null?a(l):$(l)?e.attempt(Nu,i,a)(l):(e.enter("codeFlowValue"),o(l))}function o(l){return l===null||$(l)?(e.exit("codeFlowVa\
lue"),i(l)):(e.consume(l),o)}function a(l){return e.exit("codeIndented"),t(l)}}function Ou(e,t,n){let r=this;return i;function i(a){return r.parser.lazy[r.now().
line]?n(a):$(a)?(e.enter("lineEnding"),e.consume(a),e.exit("lineEnding"),i):Tr(e,t,o,"linePrefix",4,4)(a)}function o(a){return $(a)?i(a):n(a)}}var Cr={name:"codeText",previous:Ru,resolve:Iu,tokenize:Du};function Iu(e){let t=e.length-4,n=3,r,i;if((e[n][1].type==="lineEnding"||e[n][1].type==="space")&&(e[t][1].
type==="lineEnding"||e[t][1].type==="space")){for(r=n;++r<t;)if(e[r][1].type==="codeTextData"){e[n][1].type="codeTextPadding",e[t][1].type="codeTextPadding",n+=
2,t-=2;break}}for(r=n-1,t++;++r<=t;)i===void 0?r!==t&&e[r][1].type!=="lineEnding"&&(i=r):(r===t||e[r][1].type==="lineEnding")&&(e[i][1].type="codeTextData",r!==
i+2&&(e[i][1].end=e[r-1][1].end,e.splice(i+2,r-i-2),t-=r-i-2,r=i+2),i=void 0);return e}function Ru(e){return e!==96||this.events[this.events.length-1][1].type===
"characterEscape"}function Du(e,t,n){let r=this,i=0,o,a;return l;function l(h){return e.enter("codeText"),e.enter("codeTextSequence"),u(h)}function u(h){return h===
96?(e.consume(h),i++,u):(e.exit("codeTextSequence"),d(h))}function d(h){return h===null?n(h):h===32?(e.enter("space"),e.consume(h),e.exit("space"),d):h===96?(a=
e.enter("codeTextSequence"),o=0,m(h)):$(h)?(e.enter("lineEnding"),e.consume(h),e.exit("lineEnding"),d):(e.enter("codeTextData"),p(h))}function p(h){return h===null||
h===32||h===96||$(h)?(e.exit("codeTextData"),d(h)):(e.consume(h),p)}function m(h){return h===96?(e.consume(h),o++,m):o===i?(e.exit("codeTextSequence"),e.exit("c\
odeText"),t(h)):(a.type="codeTextData",p(h))}}var Fn=class{constructor(t){this.left=t?[...t]:[],this.right=[]}get(t){if(t<0||t>=this.left.length+this.right.length)throw new RangeError("Cannot access index `"+
t+"` in a splice buffer of size `"+(this.left.length+this.right.length)+"`");return t<this.left.length?this.left[t]:this.right[this.right.length-t+this.left.length-
1]}get length(){return this.left.length+this.right.length}shift(){return this.setCursor(0),this.right.pop()}slice(t,n){let r=n??Number.POSITIVE_INFINITY;return r<
this.left.length?this.left.slice(t,r):t>this.left.length?this.right.slice(this.right.length-r+this.left.length,this.right.length-t+this.left.length).reverse():this.
left.slice(t).concat(this.right.slice(this.right.length-r+this.left.length).reverse())}splice(t,n,r){let i=n||0;this.setCursor(Math.trunc(t));let o=this.right.splice(
this.right.length-i,Number.POSITIVE_INFINITY);return r&&ln(this.left,r),o.reverse()}pop(){return this.setCursor(Number.POSITIVE_INFINITY),this.left.pop()}push(t){
this.setCursor(Number.POSITIVE_INFINITY),this.left.push(t)}pushMany(t){this.setCursor(Number.POSITIVE_INFINITY),ln(this.left,t)}unshift(t){this.setCursor(0),this.
right.push(t)}unshiftMany(t){this.setCursor(0),ln(this.right,t.reverse())}setCursor(t){if(!(t===this.left.length||t>this.left.length&&this.right.length===0||t<0&&
this.left.length===0))if(t<this.left.length){let n=this.left.splice(t,Number.POSITIVE_INFINITY);ln(this.right,n.reverse())}else{let n=this.right.splice(this.left.
length+this.right.length-t,Number.POSITIVE_INFINITY);ln(this.left,n.reverse())}}};function ln(e,t){let n=0;if(t.length<1e4)e.push(...t);else for(;n<t.length;)e.
push(...t.slice(n,n+1e4)),n+=1e4}function Pn(e){let t={},n=-1,r,i,o,a,l,u,d,p=new Fn(e);for(;++n<p.length;){for(;n in t;)n=t[n];if(r=p.get(n),n&&r[1].type==="chunkFlow"&&p.get(n-1)[1].type==="l\
istItemPrefix"&&(u=r[1]._tokenizer.events,o=0,o<u.length&&u[o][1].type==="lineEndingBlank"&&(o+=2),o<u.length&&u[o][1].type==="content"))for(;++o<u.length&&u[o][1].
type!=="content";)u[o][1].type==="chunkText"&&(u[o][1]._isInFirstContentOfListItem=!0,o++);if(r[0]==="enter")r[1].contentType&&(Object.assign(t,Mu(p,n)),n=t[n],
d=!0);else if(r[1]._container){for(o=n,i=void 0;o--;)if(a=p.get(o),a[1].type==="lineEnding"||a[1].type==="lineEndingBlank")a[0]==="enter"&&(i&&(p.get(i)[1].type=
"lineEndingBlank"),a[1].type="lineEnding",i=o);else if(!(a[1].type==="linePrefix"||a[1].type==="listItemIndent"))break;i&&(r[1].end={...p.get(i)[1].start},l=p.slice(
i,n),l.unshift(r),p.splice(i,n-i+1,l))}}return Re(e,0,Number.POSITIVE_INFINITY,p.slice(0)),!d}function Mu(e,t){let n=e.get(t)[1],r=e.get(t)[2],i=t-1,o=[],a=n._tokenizer;
a||(a=r.parser[n.contentType](n.start),n._contentTypeTextTrailing&&(a._contentTypeTextTrailing=!0));let l=a.events,u=[],d={},p,m,h=-1,f=n,_=0,C=0,T=[C];for(;f;){
for(;e.get(++i)[1]!==f;);o.push(i),f._tokenizer||(p=r.sliceStream(f),f.next||p.push(null),m&&a.defineSkip(f.start),f._isInFirstContentOfListItem&&(a._gfmTasklistFirstContentOfListItem=
!0),a.write(p),f._isInFirstContentOfListItem&&(a._gfmTasklistFirstContentOfListItem=void 0)),m=f,f=f.next}for(f=n;++h<l.length;)l[h][0]==="exit"&&l[h-1][0]==="e\
nter"&&l[h][1].type===l[h-1][1].type&&l[h][1].start.line!==l[h][1].end.line&&(C=h+1,T.push(C),f._tokenizer=void 0,f.previous=void 0,f=f.next);for(a.events=[],f?
(f._tokenizer=void 0,f.previous=void 0):T.pop(),h=T.length;h--;){let E=l.slice(T[h],T[h+1]),v=o.pop();u.push([v,v+E.length-1]),e.splice(v,2,E)}for(u.reverse(),h=
-1;++h<u.length;)d[_+u[h][0]]=_+u[h][1],_+=u[h][1]-u[h][0]-1;return d}var Or={resolve:Bu,tokenize:qu},Lu={partial:!0,tokenize:Fu};function Bu(e){return Pn(e),e}function qu(e,t){let n;return r;function r(l){return e.enter("content"),
n=e.enter("chunkContent",{contentType:"content"}),i(l)}function i(l){return l===null?o(l):$(l)?e.check(Lu,a,o)(l):(e.consume(l),i)}function o(l){return e.exit("\
chunkContent"),e.exit("content"),t(l)}function a(l){return e.consume(l),e.exit("chunkContent"),n.next=e.enter("chunkContent",{contentType:"content",previous:n}),
n=n.next,i}}function Fu(e,t,n){let r=this;return i;function i(a){return e.exit("chunkContent"),e.enter("lineEnding"),e.consume(a),e.exit("lineEnding"),ee(e,o,"l\
inePrefix")}function o(a){if(a===null||$(a))return n(a);let l=r.events[r.events.length-1];return!r.parser.constructs.disable.null.includes("codeIndented")&&l&&l[1].
type==="linePrefix"&&l[2].sliceSerialize(l[1],!0).length>=4?t(a):e.interrupt(r.parser.constructs.flow,n,t)(a)}}function zn(e,t,n,r,i,o,a,l,u){let d=u||Number.POSITIVE_INFINITY,p=0;return m;function m(E){return E===60?(e.enter(r),e.enter(i),e.enter(o),e.consume(E),e.exit(
o),h):E===null||E===32||E===41||Et(E)?n(E):(e.enter(r),e.enter(a),e.enter(l),e.enter("chunkString",{contentType:"string"}),C(E))}function h(E){return E===62?(e.
enter(o),e.consume(E),e.exit(o),e.exit(i),e.exit(r),t):(e.enter(l),e.enter("chunkString",{contentType:"string"}),f(E))}function f(E){return E===62?(e.exit("chun\
kString"),e.exit(l),h(E)):E===null||E===60||$(E)?n(E):(e.consume(E),E===92?_:f)}function _(E){return E===60||E===62||E===92?(e.consume(E),f):f(E)}function C(E){
return!p&&(E===null||E===41||ce(E))?(e.exit("chunkString"),e.exit(l),e.exit(a),e.exit(r),t(E)):p<d&&E===40?(e.consume(E),p++,C):E===41?(e.consume(E),p--,C):E===
null||E===32||E===40||Et(E)?n(E):(e.consume(E),E===92?T:C)}function T(E){return E===40||E===41||E===92?(e.consume(E),C):C(E)}}function Un(e,t,n,r,i,o){let a=this,l=0,u;return d;function d(f){return e.enter(r),e.enter(i),e.consume(f),e.exit(i),e.enter(o),p}function p(f){return l>999||f===
null||f===91||f===93&&!u||f===94&&!l&&"_hiddenFootnoteSupport"in a.parser.constructs?n(f):f===93?(e.exit(o),e.enter(i),e.consume(f),e.exit(i),e.exit(r),t):$(f)?
(e.enter("lineEnding"),e.consume(f),e.exit("lineEnding"),p):(e.enter("chunkString",{contentType:"string"}),m(f))}function m(f){return f===null||f===91||f===93||
$(f)||l++>999?(e.exit("chunkString"),p(f)):(e.consume(f),u||(u=!te(f)),f===92?h:m)}function h(f){return f===91||f===92||f===93?(e.consume(f),l++,m):m(f)}}function $n(e,t,n,r,i,o){let a;return l;function l(h){return h===34||h===39||h===40?(e.enter(r),e.enter(i),e.consume(h),e.exit(i),a=h===40?41:h,u):n(h)}function u(h){
return h===a?(e.enter(i),e.consume(h),e.exit(i),e.exit(r),t):(e.enter(o),d(h))}function d(h){return h===a?(e.exit(o),u(a)):h===null?n(h):$(h)?(e.enter("lineEndi\
ng"),e.consume(h),e.exit("lineEnding"),ee(e,d,"linePrefix")):(e.enter("chunkString",{contentType:"string"}),p(h))}function p(h){return h===a||h===null||$(h)?(e.
exit("chunkString"),d(h)):(e.consume(h),h===92?m:p)}function m(h){return h===a||h===92?(e.consume(h),p):p(h)}}function kt(e,t){let n;return r;function r(i){return $(i)?(e.enter("lineEnding"),e.consume(i),e.exit("lineEnding"),n=!0,r):te(i)?ee(e,r,n?"linePrefix":"lineSuff\
ix")(i):t(i)}}var Ir={name:"definition",tokenize:zu},Pu={partial:!0,tokenize:Uu};function zu(e,t,n){let r=this,i;return o;function o(f){return e.enter("definition"),a(f)}function a(f){
return Un.call(r,e,l,n,"definitionLabel","definitionLabelMarker","definitionLabelString")(f)}function l(f){return i=Me(r.sliceSerialize(r.events[r.events.length-
1][1]).slice(1,-1)),f===58?(e.enter("definitionMarker"),e.consume(f),e.exit("definitionMarker"),u):n(f)}function u(f){return ce(f)?kt(e,d)(f):d(f)}function d(f){
return zn(e,p,n,"definitionDestination","definitionDestinationLiteral","definitionDestinationLiteralMarker","definitionDestinationRaw","definitionDestinationStr\
ing")(f)}function p(f){return e.attempt(Pu,m,m)(f)}function m(f){return te(f)?ee(e,h,"whitespace")(f):h(f)}function h(f){return f===null||$(f)?(e.exit("definiti\
on"),r.parser.defined.push(i),t(f)):n(f)}}function Uu(e,t,n){return r;function r(l){return ce(l)?kt(e,i)(l):n(l)}function i(l){return $n(e,o,n,"definitionTitle",
"definitionTitleMarker","definitionTitleString")(l)}function o(l){return te(l)?ee(e,a,"whitespace")(l):a(l)}function a(l){return l===null||$(l)?t(l):n(l)}}var Rr={name:"hardBreakEscape",tokenize:$u};function $u(e,t,n){return r;function r(o){return e.enter("hardBreakEscape"),e.consume(o),i}function i(o){return $(o)?
(e.exit("hardBreakEscape"),t(o)):n(o)}}var Dr={name:"headingAtx",resolve:Gu,tokenize:Hu};function Gu(e,t){let n=e.length-2,r=3;if(e[r][1].type==="whitespace"&&(r+=2),n-2>r&&e[n][1].type==="whitespace"&&
(n-=2),e[n][1].type==="atxHeadingSequence"&&(r===n-1||n-4>r&&e[n-2][1].type==="whitespace")&&(n-=r+1===n?2:4),n>r){let i={type:"atxHeadingText",start:e[r][1].start,
end:e[n][1].end},o={type:"chunkText",start:e[r][1].start,end:e[n][1].end,contentType:"text"};Re(e,r,n-r+1,[["enter",i,t],["enter",o,t],["exit",o,t],["exit",i,t]])}
return e}function Hu(e,t,n){let r=0;return i;function i(p){return e.enter("atxHeading"),o(p)}function o(p){return e.enter("atxHeadingSequence"),a(p)}function a(p){
return p===35&&r++<6?(e.consume(p),a):p===null||ce(p)?(e.exit("atxHeadingSequence"),l(p)):n(p)}function l(p){return p===35?(e.enter("atxHeadingSequence"),u(p)):
p===null||$(p)?(e.exit("atxHeading"),t(p)):te(p)?ee(e,l,"whitespace")(p):(e.enter("atxHeadingText"),d(p))}function u(p){return p===35?(e.consume(p),u):(e.exit("\
atxHeadingSequence"),l(p))}function d(p){return p===null||p===35||ce(p)?(e.exit("atxHeadingText"),l(p)):(e.consume(p),d)}}var To=["address","article","aside","base","basefont","blockquote","body","caption","center","col","colgroup","dd","details","dialog","dir","div","dl","dt","fie\
ldset","figcaption","figure","footer","form","frame","frameset","h1","h2","h3","h4","h5","h6","head","header","hr","html","iframe","legend","li","link","main","\
menu","menuitem","nav","noframes","ol","optgroup","option","p","param","search","section","summary","table","tbody","td","tfoot","th","thead","title","tr","trac\
k","ul"],Mr=["pre","script","style","textarea"];var Lr={concrete:!0,name:"htmlFlow",resolveTo:Wu,tokenize:Vu},Ku={partial:!0,tokenize:Zu};function Wu(e){let t=e.length;for(;t--&&!(e[t][0]==="enter"&&e[t][1].type===
"htmlFlow"););return t>1&&e[t-2][1].type==="linePrefix"&&(e[t][1].start=e[t-2][1].start,e[t+1][1].start=e[t-2][1].start,e.splice(t-2,2)),e}function Vu(e,t,n){let r=this,
i,o,a,l,u;return d;function d(w){return p(w)}function p(w){return e.enter("htmlFlow"),e.enter("htmlFlowData"),e.consume(w),m}function m(w){return w===33?(e.consume(
w),h):w===47?(e.consume(w),o=!0,C):w===63?(e.consume(w),i=3,r.interrupt?t:y):Ce(w)?(e.consume(w),a=String.fromCharCode(w),T):n(w)}function h(w){return w===45?(e.
consume(w),i=2,f):w===91?(e.consume(w),i=5,l=0,_):Ce(w)?(e.consume(w),i=4,r.interrupt?t:y):n(w)}function f(w){return w===45?(e.consume(w),r.interrupt?t:y):n(w)}
function _(w){let he="CDATA[";return w===he.charCodeAt(l++)?(e.consume(w),l===he.length?r.interrupt?t:ie:_):n(w)}function C(w){return Ce(w)?(e.consume(w),a=String.
fromCharCode(w),T):n(w)}function T(w){if(w===null||w===47||w===62||ce(w)){let he=w===47,ve=a.toLowerCase();return!he&&!o&&Mr.includes(ve)?(i=1,r.interrupt?t(w):
ie(w)):To.includes(a.toLowerCase())?(i=6,he?(e.consume(w),E):r.interrupt?t(w):ie(w)):(i=7,r.interrupt&&!r.parser.lazy[r.now().line]?n(w):o?v(w):D(w))}return w===
45||Oe(w)?(e.consume(w),a+=String.fromCharCode(w),T):n(w)}function E(w){return w===62?(e.consume(w),r.interrupt?t:ie):n(w)}function v(w){return te(w)?(e.consume(
w),v):O(w)}function D(w){return w===47?(e.consume(w),O):w===58||w===95||Ce(w)?(e.consume(w),q):te(w)?(e.consume(w),D):O(w)}function q(w){return w===45||w===46||
w===58||w===95||Oe(w)?(e.consume(w),q):z(w)}function z(w){return w===61?(e.consume(w),A):te(w)?(e.consume(w),z):D(w)}function A(w){return w===null||w===60||w===
61||w===62||w===96?n(w):w===34||w===39?(e.consume(w),u=w,Z):te(w)?(e.consume(w),A):Y(w)}function Z(w){return w===u?(e.consume(w),u=null,X):w===null||$(w)?n(w):(e.
consume(w),Z)}function Y(w){return w===null||w===34||w===39||w===47||w===60||w===61||w===62||w===96||ce(w)?z(w):(e.consume(w),Y)}function X(w){return w===47||w===
62||te(w)?D(w):n(w)}function O(w){return w===62?(e.consume(w),oe):n(w)}function oe(w){return w===null||$(w)?ie(w):te(w)?(e.consume(w),oe):n(w)}function ie(w){return w===
45&&i===2?(e.consume(w),R):w===60&&i===1?(e.consume(w),P):w===62&&i===4?(e.consume(w),le):w===63&&i===3?(e.consume(w),y):w===93&&i===5?(e.consume(w),ne):$(w)&&(i===
6||i===7)?(e.exit("htmlFlowData"),e.check(Ku,de,W)(w)):w===null||$(w)?(e.exit("htmlFlowData"),W(w)):(e.consume(w),ie)}function W(w){return e.check(on,j,de)(w)}function j(w){
return e.enter("lineEnding"),e.consume(w),e.exit("lineEnding"),Q}function Q(w){return w===null||$(w)?W(w):(e.enter("htmlFlowData"),ie(w))}function R(w){return w===
45?(e.consume(w),y):ie(w)}function P(w){return w===47?(e.consume(w),a="",G):ie(w)}function G(w){if(w===62){let he=a.toLowerCase();return Mr.includes(he)?(e.consume(
w),le):ie(w)}return Ce(w)&&a.length<8?(e.consume(w),a+=String.fromCharCode(w),G):ie(w)}function ne(w){return w===93?(e.consume(w),y):ie(w)}function y(w){return w===
62?(e.consume(w),le):w===45&&i===2?(e.consume(w),y):ie(w)}function le(w){return w===null||$(w)?(e.exit("htmlFlowData"),de(w)):(e.consume(w),le)}function de(w){return e.
exit("htmlFlow"),t(w)}}function Zu(e,t,n){return r;function r(i){return e.enter("lineEnding"),e.consume(i),e.exit("lineEnding"),e.attempt(nt,t,n)}}var Br={name:"htmlText",tokenize:Yu};function Yu(e,t,n){let r=this,i,o,a;return l;function l(y){return e.enter("htmlText"),e.enter("htmlTextData"),e.consume(y),
u}function u(y){return y===33?(e.consume(y),d):y===47?(e.consume(y),z):y===63?(e.consume(y),D):Ce(y)?(e.consume(y),Y):n(y)}function d(y){return y===45?(e.consume(
y),p):y===91?(e.consume(y),o=0,_):Ce(y)?(e.consume(y),v):n(y)}function p(y){return y===45?(e.consume(y),f):n(y)}function m(y){return y===null?n(y):y===45?(e.consume(
y),h):$(y)?(a=m,P(y)):(e.consume(y),m)}function h(y){return y===45?(e.consume(y),f):m(y)}function f(y){return y===62?R(y):y===45?h(y):m(y)}function _(y){let le="\
CDATA[";return y===le.charCodeAt(o++)?(e.consume(y),o===le.length?C:_):n(y)}function C(y){return y===null?n(y):y===93?(e.consume(y),T):$(y)?(a=C,P(y)):(e.consume(
y),C)}function T(y){return y===93?(e.consume(y),E):C(y)}function E(y){return y===62?R(y):y===93?(e.consume(y),E):C(y)}function v(y){return y===null||y===62?R(y):
$(y)?(a=v,P(y)):(e.consume(y),v)}function D(y){return y===null?n(y):y===63?(e.consume(y),q):$(y)?(a=D,P(y)):(e.consume(y),D)}function q(y){return y===62?R(y):D(
y)}function z(y){return Ce(y)?(e.consume(y),A):n(y)}function A(y){return y===45||Oe(y)?(e.consume(y),A):Z(y)}function Z(y){return $(y)?(a=Z,P(y)):te(y)?(e.consume(
y),Z):R(y)}function Y(y){return y===45||Oe(y)?(e.consume(y),Y):y===47||y===62||ce(y)?X(y):n(y)}function X(y){return y===47?(e.consume(y),R):y===58||y===95||Ce(y)?
(e.consume(y),O):$(y)?(a=X,P(y)):te(y)?(e.consume(y),X):R(y)}function O(y){return y===45||y===46||y===58||y===95||Oe(y)?(e.consume(y),O):oe(y)}function oe(y){return y===
61?(e.consume(y),ie):$(y)?(a=oe,P(y)):te(y)?(e.consume(y),oe):X(y)}function ie(y){return y===null||y===60||y===61||y===62||y===96?n(y):y===34||y===39?(e.consume(
y),i=y,W):$(y)?(a=ie,P(y)):te(y)?(e.consume(y),ie):(e.consume(y),j)}function W(y){return y===i?(e.consume(y),i=void 0,Q):y===null?n(y):$(y)?(a=W,P(y)):(e.consume(
y),W)}function j(y){return y===null||y===34||y===39||y===60||y===61||y===96?n(y):y===47||y===62||ce(y)?X(y):(e.consume(y),j)}function Q(y){return y===47||y===62||
ce(y)?X(y):n(y)}function R(y){return y===62?(e.consume(y),e.exit("htmlTextData"),e.exit("htmlText"),t):n(y)}function P(y){return e.exit("htmlTextData"),e.enter(
"lineEnding"),e.consume(y),e.exit("lineEnding"),G}function G(y){return te(y)?ee(e,ne,"linePrefix",r.parser.constructs.disable.null.includes("codeIndented")?void 0:
4)(y):ne(y)}function ne(y){return e.enter("htmlTextData"),a(y)}}var St={name:"labelEnd",resolveAll:Ju,resolveTo:ed,tokenize:td},Xu={tokenize:nd},Qu={tokenize:rd},ju={tokenize:id};function Ju(e){let t=-1,n=[];for(;++t<e.length;){
let r=e[t][1];if(n.push(e[t]),r.type==="labelImage"||r.type==="labelLink"||r.type==="labelEnd"){let i=r.type==="labelImage"?4:2;r.type="data",t+=i}}return e.length!==
n.length&&Re(e,0,e.length,n),e}function ed(e,t){let n=e.length,r=0,i,o,a;for(;n--;){let p=e[n][1];if(i){if(p.type==="link"||p.type==="labelLink"&&p._inactive)break;
e[n][0]==="enter"&&p.type==="labelLink"&&(p._inactive=!0)}else if(o){if(e[n][0]==="enter"&&(p.type==="labelImage"||p.type==="labelLink")&&!p._balanced&&(i=n,p.type!==
"labelLink")){r=2;break}}else p.type==="labelEnd"&&(o=n)}let l={type:e[i][1].type==="labelLink"?"link":"image",start:{...e[i][1].start},end:{...e[e.length-1][1].
end}},u={type:"label",start:{...e[i][1].start},end:{...e[o][1].end}},d={type:"labelText",start:{...e[i+r+2][1].end},end:{...e[o-2][1].start}};return a=[["enter",
l,t],["enter",u,t]],a=Fe(a,e.slice(i+1,i+r+3)),a=Fe(a,[["enter",d,t]]),a=Fe(a,bt(t.parser.constructs.insideSpan.null,e.slice(i+r+4,o-3),t)),a=Fe(a,[["exit",d,t],
e[o-2],e[o-1],["exit",u,t]]),a=Fe(a,e.slice(o+1)),a=Fe(a,[["exit",l,t]]),Re(e,i,e.length,a),e}function td(e,t,n){let r=this,i=r._labelStarts,o,a;if(i){for(;i.length>
0&&i[i.length-1]._balanced;)i.pop();o=i[i.length-1]}return l;function l(h){return o?o._inactive?m(h):(a=r.parser.defined.includes(Me(r.sliceSerialize({start:o.end,
end:r.now()}))),e.enter("labelEnd"),e.enter("labelMarker"),e.consume(h),e.exit("labelMarker"),e.exit("labelEnd"),u):n(h)}function u(h){return h===40?e.attempt(Xu,
p,a?p:m)(h):h===91?e.attempt(Qu,p,a?d:m)(h):a?p(h):m(h)}function d(h){return e.attempt(ju,p,m)(h)}function p(h){return i.pop(),t(h)}function m(h){return o._balanced=
!0,n(h)}}function nd(e,t,n){return r;function r(m){return e.enter("resource"),e.enter("resourceMarker"),e.consume(m),e.exit("resourceMarker"),i}function i(m){return ce(
m)?kt(e,o)(m):o(m)}function o(m){return m===41?p(m):zn(e,a,l,"resourceDestination","resourceDestinationLiteral","resourceDestinationLiteralMarker","resourceDest\
inationRaw","resourceDestinationString",32)(m)}function a(m){return ce(m)?kt(e,u)(m):p(m)}function l(m){return n(m)}function u(m){return m===34||m===39||m===40?
$n(e,d,n,"resourceTitle","resourceTitleMarker","resourceTitleString")(m):p(m)}function d(m){return ce(m)?kt(e,p)(m):p(m)}function p(m){return m===41?(e.enter("r\
esourceMarker"),e.consume(m),e.exit("resourceMarker"),e.exit("resource"),t):n(m)}}function rd(e,t,n){let r=this;return i;function i(l){return Un.call(r,e,o,a,"r\
eference","referenceMarker","referenceString")(l)}function o(l){return r.parser.defined.includes(Me(r.sliceSerialize(r.events[r.events.length-1][1]).slice(1,-1)))?
t(l):n(l)}function a(l){return n(l)}}function id(e,t,n){return r;function r(o){return e.enter("reference"),e.enter("referenceMarker"),e.consume(o),e.exit("refer\
enceMarker"),i}function i(o){return o===93?(e.enter("referenceMarker"),e.consume(o),e.exit("referenceMarker"),e.exit("reference"),t):n(o)}}var qr={name:"labelStartImage",resolveAll:St.resolveAll,tokenize:ad};function ad(e,t,n){let r=this,i;return o;function o(u){return e.enter("labelImage"),e.enter(
"labelImageMarker"),e.consume(u),e.exit("labelImageMarker"),a}function a(u){return u===91?(e.enter("labelMarker"),e.consume(u),e.exit("labelMarker"),i=e.exit("l\
abelImage"),l):n(u)}function l(u){return u===94&&"_hiddenFootnoteSupport"in r.parser.constructs?n(u):(r._labelStarts=r._labelStarts||[],r._labelStarts.push(i),t(
u))}}var Fr={name:"labelStartLink",resolveAll:St.resolveAll,tokenize:od};function od(e,t,n){let r=this,i;return o;function o(l){return e.enter("labelLink"),e.enter("\
labelMarker"),e.consume(l),e.exit("labelMarker"),i=e.exit("labelLink"),a}function a(l){return l===94&&"_hiddenFootnoteSupport"in r.parser.constructs?n(l):(r._labelStarts=
r._labelStarts||[],r._labelStarts.push(i),t(l))}}var cn={name:"lineEnding",tokenize:sd};function sd(e,t){return n;function n(r){return e.enter("lineEnding"),e.consume(r),e.exit("lineEnding"),ee(e,t,"linePrefix")}}var vt={name:"thematicBreak",tokenize:ld};function ld(e,t,n){let r=0,i;return o;function o(d){return e.enter("thematicBreak"),a(d)}function a(d){return i=d,l(d)}
function l(d){return d===i?(e.enter("thematicBreakSequence"),u(d)):r>=3&&(d===null||$(d))?(e.exit("thematicBreak"),t(d)):n(d)}function u(d){return d===i?(e.consume(
d),r++,u):(e.exit("thematicBreakSequence"),te(d)?ee(e,l,"whitespace")(d):l(d))}}var Le={continuation:{tokenize:pd},exit:hd,name:"list",tokenize:dd},cd={partial:!0,tokenize:fd},ud={partial:!0,tokenize:md};function dd(e,t,n){let r=this,i=r.events[r.
events.length-1],o=i&&i[1].type==="linePrefix"?i[2].sliceSerialize(i[1],!0).length:0,a=0;return l;function l(f){let _=r.containerState.type||(f===42||f===43||f===
45?"listUnordered":"listOrdered");if(_==="listUnordered"?!r.containerState.marker||f===r.containerState.marker:rn(f)){if(r.containerState.type||(r.containerState.
type=_,e.enter(_,{_container:!0})),_==="listUnordered")return e.enter("listItemPrefix"),f===42||f===45?e.check(vt,n,d)(f):d(f);if(!r.interrupt||f===49)return e.
enter("listItemPrefix"),e.enter("listItemValue"),u(f)}return n(f)}function u(f){return rn(f)&&++a<10?(e.consume(f),u):(!r.interrupt||a<2)&&(r.containerState.marker?
f===r.containerState.marker:f===41||f===46)?(e.exit("listItemValue"),d(f)):n(f)}function d(f){return e.enter("listItemMarker"),e.consume(f),e.exit("listItemMark\
er"),r.containerState.marker=r.containerState.marker||f,e.check(nt,r.interrupt?n:p,e.attempt(cd,h,m))}function p(f){return r.containerState.initialBlankLine=!0,
o++,h(f)}function m(f){return te(f)?(e.enter("listItemPrefixWhitespace"),e.consume(f),e.exit("listItemPrefixWhitespace"),h):n(f)}function h(f){return r.containerState.
size=o+r.sliceSerialize(e.exit("listItemPrefix"),!0).length,t(f)}}function pd(e,t,n){let r=this;return r.containerState._closeFlow=void 0,e.check(nt,i,o);function i(l){
return r.containerState.furtherBlankLines=r.containerState.furtherBlankLines||r.containerState.initialBlankLine,ee(e,t,"listItemIndent",r.containerState.size+1)(
l)}function o(l){return r.containerState.furtherBlankLines||!te(l)?(r.containerState.furtherBlankLines=void 0,r.containerState.initialBlankLine=void 0,a(l)):(r.
containerState.furtherBlankLines=void 0,r.containerState.initialBlankLine=void 0,e.attempt(ud,t,a)(l))}function a(l){return r.containerState._closeFlow=!0,r.interrupt=
void 0,ee(e,e.attempt(Le,t,n),"linePrefix",r.parser.constructs.disable.null.includes("codeIndented")?void 0:4)(l)}}function md(e,t,n){let r=this;return ee(e,i,"\
listItemIndent",r.containerState.size+1);function i(o){let a=r.events[r.events.length-1];return a&&a[1].type==="listItemIndent"&&a[2].sliceSerialize(a[1],!0).length===
r.containerState.size?t(o):n(o)}}function hd(e){e.exit(this.containerState.type)}function fd(e,t,n){let r=this;return ee(e,i,"listItemPrefixWhitespace",r.parser.
constructs.disable.null.includes("codeIndented")?void 0:5);function i(o){let a=r.events[r.events.length-1];return!te(o)&&a&&a[1].type==="listItemPrefixWhitespac\
e"?t(o):n(o)}}var Gn={name:"setextUnderline",resolveTo:gd,tokenize:bd};function gd(e,t){let n=new ut,r=e.length,i,o,a;for(;r--;)if(e[r][0]==="enter"){if(e[r][1].type==="conte\
nt"){i=r;break}e[r][1].type==="paragraph"&&(o=r)}else e[r][1].type==="content"&&n.add(r,1,[]),!a&&e[r][1].type==="definition"&&(a=r);let l={type:"setextHeading",
start:{...e[i][1].start},end:{...e[e.length-1][1].end}};return e[o][1].type="setextHeadingText",a?(n.add(o,0,[["enter",l,t]]),n.add(a+1,0,[["exit",e[i][1],t]]),
e[i][1].end={...e[a][1].end}):e[i][1]=l,n.add(e.length,0,[["exit",l,t]]),n.consume(e),e}function bd(e,t,n){let r=this,i;return o;function o(d){let p=r.events.length,
m;for(;p--;)if(r.events[p][1].type!=="lineEnding"&&r.events[p][1].type!=="linePrefix"&&r.events[p][1].type!=="content"){m=r.events[p][1].type==="paragraph";break}
return!r.parser.lazy[r.now().line]&&(r.interrupt||m)?(e.enter("setextHeadingLine"),i=d,a(d)):n(d)}function a(d){return e.enter("setextHeadingLineSequence"),l(d)}
function l(d){return d===i?(e.consume(d),l):(e.exit("setextHeadingLineSequence"),te(d)?ee(e,u,"lineSuffix")(d):u(d))}function u(d){return d===null||$(d)?(e.exit(
"setextHeadingLine"),t(d)):n(d)}}var No={tokenize:xd};function xd(e){let t=this,n=e.attempt(nt,r,e.attempt(this.parser.constructs.flowInitial,i,ee(e,e.attempt(this.parser.constructs.flow,i,e.attempt(
Or,i)),"linePrefix")));return n;function r(o){if(o===null){e.consume(o);return}return e.enter("lineEndingBlank"),e.consume(o),e.exit("lineEndingBlank"),t.currentConstruct=
void 0,n}function i(o){if(o===null){e.consume(o);return}return e.enter("lineEnding"),e.consume(o),e.exit("lineEnding"),t.currentConstruct=void 0,n}}var Co={resolveAll:Do()},Oo=Ro("string"),Io=Ro("text");function Ro(e){return{resolveAll:Do(e==="text"?yd:void 0),tokenize:t};function t(n){let r=this,i=this.parser.
constructs[e],o=n.attempt(i,a,l);return a;function a(p){return d(p)?o(p):l(p)}function l(p){if(p===null){n.consume(p);return}return n.enter("data"),n.consume(p),
u}function u(p){return d(p)?(n.exit("data"),o(p)):(n.consume(p),u)}function d(p){if(p===null)return!0;let m=i[p],h=-1;if(m)for(;++h<m.length;){let f=m[h];if(!f.
previous||f.previous.call(r,r.previous))return!0}return!1}}}function Do(e){return t;function t(n,r){let i=-1,o;for(;++i<=n.length;)o===void 0?n[i]&&n[i][1].type===
"data"&&(o=i,i++):(!n[i]||n[i][1].type!=="data")&&(i!==o+2&&(n[o][1].end=n[i-1][1].end,n.splice(o+2,i-o-2),i=o+2),o=void 0);return e?e(n,r):n}}function yd(e,t){
let n=new ut,r=0;for(;++r<=e.length;)if((r===e.length||e[r][1].type==="lineEnding")&&e[r-1][1].type==="data"){let i=e[r-1][1],o=t.sliceStream(i),a=o.length,l=-1,
u=0,d;for(;a--;){let p=o[a];if(typeof p=="string"){for(l=p.length;p.charCodeAt(l-1)===32;)u++,l--;if(l)break;l=-1}else if(p===-2)d=!0,u++;else if(p!==-1){a++;break}}
if(t._contentTypeTextTrailing&&r===e.length&&(u=0),u){let p={type:r===e.length||d||u<2?"lineSuffix":"hardBreakTrailing",start:{_bufferIndex:a?l:i.start._bufferIndex+
l,_index:i.start._index+a,line:i.end.line,column:i.end.column-u,offset:i.end.offset-u},end:{...i.end}};i.end={...p.start},i.start.offset===i.end.offset?Object.assign(
i,p):n.add(r,0,[["enter",p,t],["exit",p,t]])}r++}return n.consume(e),e}var Pr={};Il(Pr,{attentionMarkers:()=>Td,contentInitial:()=>_d,disable:()=>Nd,document:()=>wd,flow:()=>kd,flowInitial:()=>Ed,insideSpan:()=>Ad,string:()=>Sd,text:()=>vd});var wd={42:Le,43:Le,45:Le,48:Le,49:Le,50:Le,51:Le,52:Le,53:Le,54:Le,55:Le,56:Le,57:Le,62:Mn},_d={91:Ir},Ed={[-2]:sn,[-1]:sn,32:sn},kd={35:Dr,42:vt,45:[Gn,vt],60:Lr,
61:Gn,95:vt,96:qn,126:qn},Sd={38:Bn,92:Ln},vd={[-5]:cn,[-4]:cn,[-3]:cn,33:qr,38:Bn,42:an,60:[Nr,Br],91:Fr,92:[Rr,Ln],93:St,95:an,96:Cr},Ad={null:[an,Co]},Td={null:[
42,95]},Nd={null:[]};function Mo(e,t,n){let r={_bufferIndex:-1,_index:0,line:n&&n.line||1,column:n&&n.column||1,offset:n&&n.offset||0},i={},o=[],a=[],l=[],u=!0,d={attempt:X(Z),check:X(
Y),consume:q,enter:z,exit:A,interrupt:X(Y,{interrupt:!0})},p={code:null,containerState:{},defineSkip:E,events:[],now:T,parser:e,previous:null,sliceSerialize:_,sliceStream:C,
write:f},m=t.tokenize.call(p,d),h;return t.resolveAll&&o.push(t),p;function f(W){return a=Fe(a,W),v(),a[a.length-1]!==null?[]:(O(t,0),p.events=bt(o,p.events,p),
p.events)}function _(W,j){return Od(C(W),j)}function C(W){return Cd(a,W)}function T(){let{_bufferIndex:W,_index:j,line:Q,column:R,offset:P}=r;return{_bufferIndex:W,
_index:j,line:Q,column:R,offset:P}}function E(W){i[W.line]=W.column,ie()}function v(){for(;r._index<a.length;){let W=a[r._index];if(typeof W=="string"){let j=r.
_index;for(r._bufferIndex<0&&(r._bufferIndex=0);r._index===j&&r._bufferIndex<W.length;)D(W.charCodeAt(r._bufferIndex))}else D(W)}}function D(W){u=void 0,h=W,m=m(
W)}function q(W){$(W)?(r.line++,r.column=1,r.offset+=W===-3?2:1,ie()):W!==-1&&(r.column++,r.offset++),r._bufferIndex<0?r._index++:(r._bufferIndex++,r._bufferIndex===
a[r._index].length&&(r._bufferIndex=-1,r._index++)),p.previous=W,u=!0}function z(W,j){let Q=j||{};return Q.type=W,Q.start=T(),p.events.push(["enter",Q,p]),l.push(
Q),Q}function A(W){let j=l.pop();return j.end=T(),p.events.push(["exit",j,p]),j}function Z(W,j){O(W,j.from)}function Y(W,j){j.restore()}function X(W,j){return Q;
function Q(R,P,G){let ne,y,le,de;return Array.isArray(R)?he(R):"tokenize"in R?he([R]):w(R);function w(_e){return st;function st(Ue){let Qe=Ue!==null&&_e[Ue],Ze=Ue!==
null&&_e.null,je=[...Array.isArray(Qe)?Qe:Qe?[Qe]:[],...Array.isArray(Ze)?Ze:Ze?[Ze]:[]];return he(je)(Ue)}}function he(_e){return ne=_e,y=0,_e.length===0?G:ve(
_e[y])}function ve(_e){return st;function st(Ue){return de=oe(),le=_e,_e.partial||(p.currentConstruct=_e),_e.name&&p.parser.constructs.disable.null.includes(_e.
name)?ot(Ue):_e.tokenize.call(j?Object.assign(Object.create(p),j):p,d,Ve,ot)(Ue)}}function Ve(_e){return u=!0,W(le,de),P}function ot(_e){return u=!0,de.restore(),
++y<ne.length?ve(ne[y]):G}}}function O(W,j){W.resolveAll&&!o.includes(W)&&o.push(W),W.resolve&&Re(p.events,j,p.events.length-j,W.resolve(p.events.slice(j),p)),W.
resolveTo&&(p.events=W.resolveTo(p.events,p))}function oe(){let W=T(),j=p.previous,Q=p.currentConstruct,R=p.events.length,P=Array.from(l);return{from:R,restore:G};
function G(){r=W,p.previous=j,p.currentConstruct=Q,p.events.length=R,l=P,ie()}}function ie(){r.line in i&&r.column<2&&(r.column=i[r.line],r.offset+=i[r.line]-1)}}
function Cd(e,t){let n=t.start._index,r=t.start._bufferIndex,i=t.end._index,o=t.end._bufferIndex,a;if(n===i)a=[e[n].slice(r,o)];else{if(a=e.slice(n,i),r>-1){let l=a[0];
typeof l=="string"?a[0]=l.slice(r):a.shift()}o>0&&a.push(e[i].slice(0,o))}return a}function Od(e,t){let n=-1,r=[],i;for(;++n<e.length;){let o=e[n],a;if(typeof o==
"string")a=o;else switch(o){case-5:{a="\r";break}case-4:{a=`
`;break}case-3:{a=`\r
`;break}case-2:{a=t?" ":"	";break}case-1:{if(!t&&i)continue;a=" ";break}default:a=String.fromCharCode(o)}i=o===-2,r.push(a)}return r.join("")}function zr(e){let r={constructs:Rn([Pr,...(e||{}).extensions||[]]),content:i(Eo),defined:[],document:i(vo),flow:i(No),lazy:{},string:i(Oo),text:i(Io)};return r;
function i(o){return a;function a(l){return Mo(r,o,l)}}}function Ur(e){for(;!Pn(e););return e}var Lo=/[\0\t\n\r]/g;function $r(){let e=1,t="",n=!0,r;return i;function i(o,a,l){o=t+(typeof o=="string"?o.toString():new TextDecoder(a||void 0).decode(o));let u=[],
d=0;for(t="",n&&(o.charCodeAt(0)===65279&&d++,n=void 0);d<o.length;){Lo.lastIndex=d;let p=Lo.exec(o),m=p&&p.index!==void 0?p.index:o.length,h=o.charCodeAt(m);if(!p){
t=o.slice(d);break}if(h===10&&d===m&&r)u.push(-3),r=void 0;else switch(r&&(u.push(-5),r=void 0),d<m&&(u.push(o.slice(d,m)),e+=m-d),h){case 0:{u.push(65533),e++;
break}case 9:{let f=Math.ceil(e/4)*4;for(u.push(-2);e++<f;)u.push(-1);break}case 10:{u.push(-4),e=1;break}default:r=!0,e=1}d=m+1}return l&&(r&&u.push(-5),t&&u.push(
t),u.push(null)),u}}var Id=/\\([!-/:-@[-`{-~])|&(#(?:\d{1,7}|x[\da-f]{1,6})|[\da-z]{1,31});/gi;function Bo(e){return e.replace(Id,Rd)}function Rd(e,t,n){if(t)return t;if(n.charCodeAt(
0)===35){let i=n.charCodeAt(1),o=i===120||i===88;return Dn(n.slice(o?2:1),o?16:10)}return zt(n)||e}function $t(e){return!e||typeof e!="object"?"":"position"in e||"type"in e?qo(e.position):"start"in e||"end"in e?qo(e):"line"in e||"column"in e?Gr(e):""}function Gr(e){
return Fo(e&&e.line)+":"+Fo(e&&e.column)}function qo(e){return Gr(e&&e.start)+"-"+Gr(e&&e.end)}function Fo(e){return e&&typeof e=="number"?e:1}var zo={}.hasOwnProperty;function Uo(e,t,n){return t&&typeof t=="object"&&(n=t,t=void 0),Dd(n)(Ur(zr(n).document().write($r()(e,t,!0))))}function Dd(e){let t={afterExit:[],
beforeEnter:[],transforms:[],canContainEols:["emphasis","fragment","heading","paragraph","strong"],enter:{autolink:a(Ae),autolinkProtocol:O,autolinkEmail:O,atxHeading:a(
me),blockQuote:a(Qe),characterEscape:O,characterReference:O,codeFenced:a(Ze),codeFencedFenceInfo:l,codeFencedFenceMeta:l,codeIndented:a(Ze,l),codeText:a(je,l),codeTextData:O,
data:O,codeFlowValue:O,definition:a(Rt),definitionDestinationString:l,definitionLabelString:l,definitionTitleString:l,emphasis:a(Pe),hardBreakEscape:a(Ye),hardBreakTrailing:a(
Ye),htmlFlow:a(re,l),htmlFlowData:O,htmlText:a(re,l),htmlTextData:O,image:a(Dt),label:l,link:a(Ae),listItem:a(Mt),listItemValue:f,listOrdered:a(fe,h),listUnordered:a(
fe),paragraph:a(lt),reference:he,referenceString:l,resourceDestinationString:l,resourceTitleString:l,setextHeading:a(me),strong:a(Yt),thematicBreak:a(H)},exit:{
atxHeading:d(),atxHeadingSequence:A,autolink:d(),autolinkEmail:Ue,autolinkProtocol:st,blockQuote:d(),characterEscapeValue:oe,characterReferenceMarkerHexadecimal:Ve,
characterReferenceMarkerNumeric:Ve,characterReferenceValue:ot,characterReference:_e,codeFenced:d(E),codeFencedFence:T,codeFencedFenceInfo:_,codeFencedFenceMeta:C,
codeFlowValue:oe,codeIndented:d(v),codeText:d(R),codeTextData:oe,data:oe,definition:d(),definitionDestinationString:z,definitionLabelString:D,definitionTitleString:q,
emphasis:d(),hardBreakEscape:d(W),hardBreakTrailing:d(W),htmlFlow:d(j),htmlFlowData:oe,htmlText:d(Q),htmlTextData:oe,image:d(G),label:y,labelText:ne,lineEnding:ie,
link:d(P),listItem:d(),listOrdered:d(),listUnordered:d(),paragraph:d(),referenceString:ve,resourceDestinationString:le,resourceTitleString:de,resource:w,setextHeading:d(
X),setextHeadingLineSequence:Y,setextHeadingText:Z,strong:d(),thematicBreak:d()}};$o(t,(e||{}).mdastExtensions||[]);let n={};return r;function r(k){let M={type:"\
root",children:[],position:void 0},K={stack:[M],tokenStack:[],config:t,enter:u,exit:p,buffer:l,resume:m,data:n},J=[],ye=[],be=-1;for(;++be<k.length;)if(ye.push(
k[be]),k[be][1].type==="listOrdered"||k[be][1].type==="listUnordered")if(k[be][0]==="enter")J.push(ye.length-1);else{let De=J.pop();o(ye,De)}for(k=ye,be=-1;++be<
k.length;){let De=t[k[be][0]];k[be][0]==="enter"&&t.beforeEnter.length>0&&i(t.beforeEnter,{...K,sliceSerialize:k[be][2].sliceSerialize},k[be][1]),zo.call(De,k[be][1].
type)&&De[k[be][1].type].call({...K,sliceSerialize:k[be][2].sliceSerialize},k[be][1]),k[be][0]==="exit"&&t.afterExit.length>0&&i(t.afterExit,{...K,sliceSerialize:k[be][2].
sliceSerialize},k[be][1])}if(K.tokenStack.length>0){let De=K.tokenStack[K.tokenStack.length-1];(De[1]||Po).call(K,void 0,De[0])}for(M.position={start:xt(k.length>
0?k[0][1].start:{line:1,column:1,offset:0}),end:xt(k.length>0?k[k.length-2][1].end:{line:1,column:1,offset:0})},be=-1;++be<t.transforms.length;)M=t.transforms[be](
M)||M;return M}function i(k,M,K){let J=-1;for(;++J<k.length;)k[J].call(M,K)}function o(k,M){let K=k.length-1,J=M-1,ye=-1,be=!1,De,Je,Qt,jt,Jt=[];for(;++J<=K;){let $e=k[J];
switch($e[1].type){case"listUnordered":case"listOrdered":case"blockQuote":{$e[0]==="enter"?ye++:ye--,jt=void 0;break}case"lineEndingBlank":{$e[0]==="enter"&&(De&&
!jt&&!ye&&!Qt&&(Qt=J),jt=void 0);break}case"linePrefix":case"listItemValue":case"listItemMarker":case"listItemPrefix":case"listItemPrefixWhitespace":break;default:
jt=void 0}if(!ye&&$e[0]==="enter"&&$e[1].type==="listItemPrefix"||ye===-1&&$e[0]==="exit"&&($e[1].type==="listUnordered"||$e[1].type==="listOrdered")){if(De){let Lt=J;
for(Je=void 0;Lt--;){let ct=k[Lt];if(ct[1].type==="lineEnding"||ct[1].type==="lineEndingBlank"){if(ct[0]==="exit")continue;Je&&(k[Je][1].type="lineEndingBlank",
be=!0),ct[1].type="lineEnding",Je=Lt}else if(!(ct[1].type==="linePrefix"||ct[1].type==="blockQuotePrefix"||ct[1].type==="blockQuotePrefixWhitespace"||ct[1].type===
"blockQuoteMarker"||ct[1].type==="listItemIndent"))break}Qt&&(!Je||Qt<Je)&&(De._spread=!0),De.end=Object.assign({},Je?k[Je][1].start:$e[1].end),Jt.push({at:Je||
J,event:["exit",De,$e[2]]})}if($e[1].type==="listItemPrefix"){let Lt={type:"listItem",_spread:!1,start:Object.assign({},$e[1].start),end:void 0};De=Lt,Jt.push({
at:J,event:["enter",Lt,$e[2]]}),Qt=void 0,jt=!0}}}let Fi=k.splice(M),dr=0;for(J=-1;++J<Fi.length;){for(;dr<Jt.length&&Jt[dr].at===M+J;)k.push(Jt[dr++].event);k.
push(Fi[J])}k[M][1]._spread=be}function a(k,M){return K;function K(J){u.call(this,k(J),J),M&&M.call(this,J)}}function l(){this.stack.push({type:"fragment",children:[]})}
function u(k,M,K){this.stack[this.stack.length-1].children.push(k),this.stack.push(k),this.tokenStack.push([M,K||void 0]),k.position={start:xt(M.start),end:void 0}}
function d(k){return M;function M(K){k&&k.call(this,K),p.call(this,K)}}function p(k,M){let K=this.stack.pop(),J=this.tokenStack.pop();if(!J)throw new Error("Can\
not close `"+k.type+"` ("+$t({start:k.start,end:k.end})+"): it\u2019s not open");J[0].type!==k.type&&(M?M.call(this,k,J[0]):(J[1]||Po).call(this,k,J[0])),K.position.
end=xt(k.end)}function m(){return vr(this.stack.pop())}function h(){this.data.expectingFirstListItemValue=!0}function f(k){if(this.data.expectingFirstListItemValue){
let M=this.stack[this.stack.length-2];M.start=Number.parseInt(this.sliceSerialize(k),10),this.data.expectingFirstListItemValue=void 0}}function _(){let k=this.resume(),
M=this.stack[this.stack.length-1];M.lang=k}function C(){let k=this.resume(),M=this.stack[this.stack.length-1];M.meta=k}function T(){this.data.flowCodeInside||(this.
buffer(),this.data.flowCodeInside=!0)}function E(){let k=this.resume(),M=this.stack[this.stack.length-1];M.value=k.replace(/^(\r?\n|\r)|(\r?\n|\r)$/g,""),this.data.
flowCodeInside=void 0}function v(){let k=this.resume(),M=this.stack[this.stack.length-1];M.value=k.replace(/(\r?\n|\r)$/g,"")}function D(k){let M=this.resume(),
K=this.stack[this.stack.length-1];K.label=M,K.identifier=Me(this.sliceSerialize(k)).toLowerCase()}function q(){let k=this.resume(),M=this.stack[this.stack.length-
1];M.title=k}function z(){let k=this.resume(),M=this.stack[this.stack.length-1];M.url=k}function A(k){let M=this.stack[this.stack.length-1];if(!M.depth){let K=this.
sliceSerialize(k).length;M.depth=K}}function Z(){this.data.setextHeadingSlurpLineEnding=!0}function Y(k){let M=this.stack[this.stack.length-1];M.depth=this.sliceSerialize(
k).codePointAt(0)===61?1:2}function X(){this.data.setextHeadingSlurpLineEnding=void 0}function O(k){let K=this.stack[this.stack.length-1].children,J=K[K.length-
1];(!J||J.type!=="text")&&(J=Xt(),J.position={start:xt(k.start),end:void 0},K.push(J)),this.stack.push(J)}function oe(k){let M=this.stack.pop();M.value+=this.sliceSerialize(
k),M.position.end=xt(k.end)}function ie(k){let M=this.stack[this.stack.length-1];if(this.data.atHardBreak){let K=M.children[M.children.length-1];K.position.end=
xt(k.end),this.data.atHardBreak=void 0;return}!this.data.setextHeadingSlurpLineEnding&&t.canContainEols.includes(M.type)&&(O.call(this,k),oe.call(this,k))}function W(){
this.data.atHardBreak=!0}function j(){let k=this.resume(),M=this.stack[this.stack.length-1];M.value=k}function Q(){let k=this.resume(),M=this.stack[this.stack.length-
1];M.value=k}function R(){let k=this.resume(),M=this.stack[this.stack.length-1];M.value=k}function P(){let k=this.stack[this.stack.length-1];if(this.data.inReference){
let M=this.data.referenceType||"shortcut";k.type+="Reference",k.referenceType=M,delete k.url,delete k.title}else delete k.identifier,delete k.label;this.data.referenceType=
void 0}function G(){let k=this.stack[this.stack.length-1];if(this.data.inReference){let M=this.data.referenceType||"shortcut";k.type+="Reference",k.referenceType=
M,delete k.url,delete k.title}else delete k.identifier,delete k.label;this.data.referenceType=void 0}function ne(k){let M=this.sliceSerialize(k),K=this.stack[this.
stack.length-2];K.label=Bo(M),K.identifier=Me(M).toLowerCase()}function y(){let k=this.stack[this.stack.length-1],M=this.resume(),K=this.stack[this.stack.length-
1];if(this.data.inReference=!0,K.type==="link"){let J=k.children;K.children=J}else K.alt=M}function le(){let k=this.resume(),M=this.stack[this.stack.length-1];M.
url=k}function de(){let k=this.resume(),M=this.stack[this.stack.length-1];M.title=k}function w(){this.data.inReference=void 0}function he(){this.data.referenceType=
"collapsed"}function ve(k){let M=this.resume(),K=this.stack[this.stack.length-1];K.label=M,K.identifier=Me(this.sliceSerialize(k)).toLowerCase(),this.data.referenceType=
"full"}function Ve(k){this.data.characterReferenceType=k.type}function ot(k){let M=this.sliceSerialize(k),K=this.data.characterReferenceType,J;K?(J=Dn(M,K==="ch\
aracterReferenceMarkerNumeric"?10:16),this.data.characterReferenceType=void 0):J=zt(M);let ye=this.stack[this.stack.length-1];ye.value+=J}function _e(k){let M=this.
stack.pop();M.position.end=xt(k.end)}function st(k){oe.call(this,k);let M=this.stack[this.stack.length-1];M.url=this.sliceSerialize(k)}function Ue(k){oe.call(this,
k);let M=this.stack[this.stack.length-1];M.url="mailto:"+this.sliceSerialize(k)}function Qe(){return{type:"blockquote",children:[],position:void 0}}function Ze(){
return{type:"code",lang:null,meta:null,value:"",position:void 0}}function je(){return{type:"inlineCode",value:"",position:void 0}}function Rt(){return{type:"def\
inition",identifier:"",label:null,title:null,url:"",position:void 0}}function Pe(){return{type:"emphasis",children:[],position:void 0}}function me(){return{type:"\
heading",depth:0,children:[],position:void 0}}function Ye(){return{type:"break",position:void 0}}function re(){return{type:"html",value:"",position:void 0}}function Dt(){
return{type:"image",title:null,url:"",alt:null,position:void 0}}function Ae(){return{type:"link",title:null,url:"",children:[],position:void 0}}function fe(k){return{
type:"list",ordered:k.type==="listOrdered",start:null,spread:k._spread,children:[],position:void 0}}function Mt(k){return{type:"listItem",spread:k._spread,checked:null,
children:[],position:void 0}}function lt(){return{type:"paragraph",children:[],position:void 0}}function Yt(){return{type:"strong",children:[],position:void 0}}
function Xt(){return{type:"text",value:"",position:void 0}}function H(){return{type:"thematicBreak",position:void 0}}}function xt(e){return{line:e.line,column:e.
column,offset:e.offset}}function $o(e,t){let n=-1;for(;++n<t.length;){let r=t[n];Array.isArray(r)?$o(e,r):Md(e,r)}}function Md(e,t){let n;for(n in t)if(zo.call(
t,n))switch(n){case"canContainEols":{let r=t[n];r&&e[n].push(...r);break}case"transforms":{let r=t[n];r&&e[n].push(...r);break}case"afterExit":case"beforeEnter":{
let r=t[n];r&&e[n].push(r);break}case"enter":case"exit":{let r=t[n];r&&Object.assign(e[n],r);break}}}function Po(e,t){throw e?new Error("Cannot close `"+e.type+
"` ("+$t({start:e.start,end:e.end})+"): a different token (`"+t.type+"`, "+$t({start:t.start,end:t.end})+") is open"):new Error("Cannot close document, a token \
(`"+t.type+"`, "+$t({start:t.start,end:t.end})+") is still open")}function Hr(e,t){let n=String(e);if(typeof t!="string")throw new TypeError("Expected character");let r=0,i=n.indexOf(t);for(;i!==-1;)r++,i=n.indexOf(t,i+t.length);
return r}function Kr(e){if(typeof e!="string")throw new TypeError("Expected a string");return e.replace(/[|\\{}()[\]^$+*?.]/g,"\\$&").replace(/-/g,"\\x2d")}var Gt=(function(e){if(e==null)return Fd;if(typeof e=="function")return Hn(e);if(typeof e=="object")return Array.isArray(e)?Ld(e):Bd(e);if(typeof e=="string")return qd(
e);throw new Error("Expected function, string, or object as test")});function Ld(e){let t=[],n=-1;for(;++n<e.length;)t[n]=Gt(e[n]);return Hn(r);function r(...i){
let o=-1;for(;++o<t.length;)if(t[o].apply(this,i))return!0;return!1}}function Bd(e){let t=e;return Hn(n);function n(r){let i=r,o;for(o in e)if(i[o]!==t[o])return!1;
return!0}}function qd(e){return Hn(t);function t(n){return n&&n.type===e}}function Hn(e){return t;function t(n,r,i){return!!(Pd(n)&&e.call(this,n,typeof r=="num\
ber"?r:void 0,i||void 0))}}function Fd(){return!0}function Pd(e){return e!==null&&typeof e=="object"&&"type"in e}var Ho=[],Ko=!0,Kn=!1,un="skip";function Wr(e,t,n,r){if(!e||typeof e!="object")throw new Error("Unexpected value `"+e+"` for `tree`, expected node");let i=!0,o,
a,l,u;if(typeof n=="function"||n&&typeof n=="object"?(o=t,a=n,r&&(i=!1)):(a=t,n&&(i=!1)),typeof a=="function")l=a;else if(a&&typeof a=="object"){if(!(a.enter===
null||a.enter===void 0))if(typeof a.enter=="function")l=a.enter;else throw new Error("Unexpected value `"+a.enter+"` for `visitors.enter`, expected optional vis\
itor");if(typeof a.exit=="function")u=a.exit;else throw new Error("Unexpected value `"+a.exit+"` for `visitors.exit`, expected visitor (pass a visitor directly \
if you only want an enter visitor)")}else throw new Error("Unexpected value `"+a+"` for `enter` or `visitors`, expected visitor or object with visitors");let d=Gt(
o),p=i?1:-1;m(e,void 0,[])();function m(h,f,_){let C=h&&typeof h=="object"?h:{};if(typeof C.type=="string"){let E=typeof C.tagName=="string"?C.tagName:typeof C.
name=="string"?C.name:void 0;Object.defineProperty(T,"name",{value:"node ("+(h.type+(E?"<"+E+">":""))+")"})}return T;function T(){let E=!o||d(h,f,_[_.length-1]||
void 0),v=Ho;if(l&&E&&(v=Go(l(h,_,f)),v[0]===Kn))return v;if("children"in h&&h.children){let D=h;if(D.children&&v[0]!==un){let q=(i?-1:D.children.length)+p,z=[..._,
D];for(;q>-1&&q<D.children.length;){let A=D.children[q],Z=m(A,q,z)();if(Z[0]===Kn)return Z;q=typeof Z[1]=="number"?Z[1]:q+p}}}if(u&&E){let D=Go(u(h,_,f));if(D[0]===
un)throw new Error("Unexpected value `"+D[0]+"` from `exit`, expected `CONTINUE`, `EXIT`, index, or nothing");if(D[0]===Kn||typeof D[1]=="number")return D}return v}}}
function Go(e){return Array.isArray(e)?e:typeof e=="number"?[Ko,e]:e==null?Ho:[e]}function Vr(e,t,n){let i=Gt((n||{}).ignore||[]),o=zd(t),a=-1;for(;++a<o.length;)Wr(e,l);function l(d,p,m){if(d.type==="text"&&typeof m=="number")return u(d,p,m);
if(i(d,m,p[p.length-1]))return un}function u(d,p,m){let h=p[p.length-1],f=o[a][0],_=o[a][1],C=0,T=!1,E=[];f.lastIndex=0;let v=f.exec(d.value);for(;v;){let q=v.index,
z={index:v.index,input:v.input,stack:[...p,d]},A=_(...v,z);if(typeof A=="string"&&(A=A.length>0?{type:"text",value:A}:void 0),A===!1)f.lastIndex=q+1;else{if(C!==
q&&D({type:"text",value:d.value.slice(C,q)}),Array.isArray(A))for(let Z of A)D(Z);else A&&D(A);C=q+v[0].length,T=!0}if(!f.global)break;v=f.exec(d.value)}return T?
(C<d.value.length&&D({type:"text",value:d.value.slice(C)}),h.children.splice(m,1,...E)):E=[d],m+E.length;function D(q){let z=E[E.length-1];z&&z.type==="text"&&q.
type==="text"?z.value+=q.value:E.push(q)}}}function zd(e){if(!Array.isArray(e))throw new TypeError("Expected find and replace tuple or list of tuples");let t=[],
n=!e[0]||Array.isArray(e[0])?e:[e],r=-1;for(;++r<n.length;){let i=n[r];t.push([Ud(i[0]),$d(i[1])])}return t}function Ud(e){return typeof e=="string"?new RegExp(
Kr(e),"g"):e}function $d(e){return typeof e=="function"?e:function(){return e}}function Yr(){return{transforms:[Zd],enter:{literalAutolink:Gd,literalAutolinkEmail:Zr,literalAutolinkHttp:Zr,literalAutolinkWww:Zr},exit:{literalAutolink:Vd,literalAutolinkEmail:Wd,
literalAutolinkHttp:Hd,literalAutolinkWww:Kd}}}function Gd(e){this.enter({type:"link",title:null,url:"",children:[],position:void 0},e)}function Zr(e){this.config.enter.autolinkProtocol.call(this,e)}function Hd(e){
this.config.exit.autolinkProtocol.call(this,e)}function Kd(e){this.config.exit.data.call(this,e);let t=this.stack[this.stack.length-1];t.type,t.url="http://"+this.
sliceSerialize(e)}function Wd(e){this.config.exit.autolinkEmail.call(this,e)}function Vd(e){this.exit(e)}function Zd(e){Vr(e,[[/(?<![\da-z])(https?:\/\/|www(?=\.))([\w-]*\.[\w\-.]*)([^\t\n\r ]*)/gi,
Yd],[/(?<![\w+\-.@])xmpp:([\w+\-.]+)@([\w-]+(?:\.[\w-]+)+)(\/(?:[\w\-/]|\.(?=[\dA-Za-z]))*)?/g,jd],[/(?<![\w+\-.@])mailto:([\w+\-.]+)@([\w-]+(?:\.[\w-]+)+)/g,Qd],
[/(?<![\w+\-.]|(?:^|[^\d@A-Za-z])(?:mailto|xmpp):)([\w+\-.]+)@([\w-]+(?:\.[\w-]+)+)/g,Xd]],{ignore:["link","linkReference"]})}function Yd(e,t,n,r,i){if(!tp(i))return!1;
let o="";if(/^w/i.test(t)&&(n=t+n,t="",o="http://"),ft(n.charCodeAt(0))||!Jd(n))return!1;let a=ep(n+r),l={type:"link",title:null,url:o+t+a[0],children:[{type:"t\
ext",value:t+a[0],position:void 0}],position:void 0};return a[1]?[l,{type:"text",value:a[1],position:void 0}]:l}function Xd(e,t,n){return/[\d\-_]$/.test(n)?!1:{
type:"link",title:null,url:"mailto:"+t+"@"+n,children:[{type:"text",value:t+"@"+n,position:void 0}],position:void 0}}function Qd(e,t,n){if(/[\d\-_]$/.test(n))return!1;
let r="mailto:"+t+"@"+n;return{type:"link",title:null,url:r,children:[{type:"text",value:r,position:void 0}],position:void 0}}function jd(e,t,n,r,i){if(/[\d\-_]$/.
test(n)||r&&(!/[A-Za-z]$/.test(r)||i.input.charAt(i.index+e.length)==="@"))return!1;let o="xmpp:"+t+"@"+n+(r||"");return{type:"link",title:null,url:o,children:[
{type:"text",value:o,position:void 0}],position:void 0}}function Jd(e){let t=e.split(".");return!(t.length<2||t[t.length-1]&&(/_/.test(t[t.length-1])||!/[\dA-Za-z]/.
test(t[t.length-1]))||t[t.length-2]&&(/_/.test(t[t.length-2])||!/[\dA-Za-z]/.test(t[t.length-2])))}function ep(e){let t=e.length;for(;t>0;){let a=e.charCodeAt(t-
1);if(a===33||a===34||a===38||a===39||a===41||a===44||a===46||a===58||a===59||a===60||a===62||a===63||a===93||a===125)t--;else break}if(t===e.length)return[e,void 0];
let n=e.slice(t);e=e.slice(0,t);let r=n.indexOf(")"),i=Hr(e,"("),o=Hr(e,")");for(;r!==-1&&i>o;)e+=n.slice(0,r+1),n=n.slice(r+1),r=n.indexOf(")"),o++;return[e,n]}
function tp(e){let t=e.input.charCodeAt(e.index-1);return e.index===0||tt(t)||ft(t)}pp.peek=dp;function rp(){this.buffer()}function ip(e){this.enter({type:"footnoteReference",identifier:"",label:""},e)}function ap(){this.buffer()}function op(e){
this.enter({type:"footnoteDefinition",identifier:"",label:"",children:[]},e)}function sp(e){let t=this.resume(),n=this.stack[this.stack.length-1];n.type,n.identifier=
Me(this.sliceSerialize(e)).toLowerCase(),n.label=t}function lp(e){this.exit(e)}function cp(e){let t=this.resume(),n=this.stack[this.stack.length-1];n.type,n.identifier=
Me(this.sliceSerialize(e)).toLowerCase(),n.label=t}function up(e){this.exit(e)}function dp(){return"["}function pp(e,t,n,r){let i=n.createTracker(r),o=i.move("[\
^"),a=n.enter("footnoteReference"),l=n.enter("reference");return o+=i.move(n.safe(n.associationId(e),{after:"]",before:o})),l(),a(),o+=i.move("]"),o}function Xr(){
return{enter:{gfmFootnoteCallString:rp,gfmFootnoteCall:ip,gfmFootnoteDefinitionLabelString:ap,gfmFootnoteDefinition:op},exit:{gfmFootnoteCallString:sp,gfmFootnoteCall:lp,
gfmFootnoteDefinitionLabelString:cp,gfmFootnoteDefinition:up}}}Wo.attention=gp;Wo.peek=bp;function Qr(){return{canContainEols:["delete"],enter:{strikethrough:hp},exit:{strikethrough:fp}}}function hp(e){this.enter({type:"delete",children:[],position:void 0},e)}function fp(e){this.exit(e)}function Wo(e,t,n,r){let i=n.createTracker(r),o=n.stack.includes(
"strikethrough")?"~":"~~",a=n.enter("strikethrough"),l=i.move(o);return l+=n.containerPhrasing(e,{...i.current(),before:l,after:"~"}),l+=i.move(o),a(),l}function gp(){
return{construct:"strikethrough",markers:["~"],sizes:[2,1]}}function bp(){return"~"}function Jr(){return{enter:{table:yp,tableData:Vo,tableHeader:Vo,tableRow:_p},exit:{codeText:Ep,table:wp,tableData:jr,tableHeader:jr,tableRow:jr}}}function yp(e){
let t=e._align;this.enter({type:"table",align:t.map(function(n){return n==="none"?null:n}),children:[],position:void 0},e),this.data.inTable=!0}function wp(e){this.
exit(e),this.data.inTable=void 0}function _p(e){this.enter({type:"tableRow",children:[],position:void 0},e)}function jr(e){this.exit(e)}function Vo(e){this.enter(
{type:"tableCell",children:[],position:void 0},e)}function Ep(e){let t=this.resume();this.data.inTable&&(t=t.replace(/\\([\\|])/g,kp));let n=this.stack[this.stack.
length-1];n.type,n.value=t,this.exit(e)}function kp(e,t){return t==="|"?t:e}function ei(){return{exit:{taskListCheckValueChecked:Zo,taskListCheckValueUnchecked:Zo,paragraph:vp}}}function Zo(e){let t=this.stack[this.stack.length-2];t.type,t.checked=e.type==="taskListCheckValueChecked"}function vp(e){let t=this.stack[this.stack.length-2];
if(t&&t.type==="listItem"&&typeof t.checked=="boolean"){let n=this.stack[this.stack.length-1];n.type;let r=n.children[0];if(r&&r.type==="text"){let i=t.children,
o=-1,a;for(;++o<i.length;){let l=i[o];if(l.type==="paragraph"){a=l;break}}a===n&&(r.value=r.value.slice(1),r.value.length===0?n.children.shift():n.position&&r.position&&
typeof r.position.start.offset=="number"&&(r.position.start.column++,r.position.start.offset++,n.position.start={...r.position.start}))}}this.exit(e)}function Yo(){return[Yr(),Xr(),Qr(),Jr(),ei()]}function Xo(){return{enter:{mathFlow:e,mathFlowFenceMeta:t,mathText:o},exit:{mathFlow:i,mathFlowFence:r,mathFlowFenceMeta:n,mathFlowValue:l,mathText:a,mathTextData:l}};
function e(u){let d={type:"element",tagName:"code",properties:{className:["language-math","math-display"]},children:[]};this.enter({type:"math",meta:null,value:"",
data:{hName:"pre",hChildren:[d]}},u)}function t(){this.buffer()}function n(){let u=this.resume(),d=this.stack[this.stack.length-1];d.type,d.meta=u}function r(){
this.data.mathFlowInside||(this.buffer(),this.data.mathFlowInside=!0)}function i(u){let d=this.resume().replace(/^(\r?\n|\r)|(\r?\n|\r)$/g,""),p=this.stack[this.
stack.length-1];p.type,this.exit(u),p.value=d;let m=p.data.hChildren[0];m.type,m.tagName,m.children.push({type:"text",value:d}),this.data.mathFlowInside=void 0}
function o(u){this.enter({type:"inlineMath",value:"",data:{hName:"code",hProperties:{className:["language-math","math-inline"]},hChildren:[]}},u),this.buffer()}
function a(u){let d=this.resume(),p=this.stack[this.stack.length-1];p.type,this.exit(u),p.value=d,p.data.hChildren.push({type:"text",value:d})}function l(u){this.
config.enter.data.call(this,u),this.config.exit.data.call(this,u)}}var Tp={tokenize:Rp,partial:!0},Qo={tokenize:Dp,partial:!0},jo={tokenize:Mp,partial:!0},Jo={tokenize:Lp,partial:!0},Np={tokenize:Bp,partial:!0},es={name:"wwwAut\
olink",tokenize:Op,previous:ns},ts={name:"protocolAutolink",tokenize:Ip,previous:rs},dt={name:"emailAutolink",tokenize:Cp,previous:is},rt={};function ni(){return{
text:rt}}var At=48;for(;At<123;)rt[At]=dt,At++,At===58?At=65:At===91&&(At=97);rt[43]=dt;rt[45]=dt;rt[46]=dt;rt[95]=dt;rt[72]=[dt,ts];rt[104]=[dt,ts];rt[87]=[dt,
es];rt[119]=[dt,es];function Cp(e,t,n){let r=this,i,o;return a;function a(m){return!ti(m)||!is.call(r,r.previous)||ri(r.events)?n(m):(e.enter("literalAutolink"),
e.enter("literalAutolinkEmail"),l(m))}function l(m){return ti(m)?(e.consume(m),l):m===64?(e.consume(m),u):n(m)}function u(m){return m===46?e.check(Np,p,d)(m):m===
45||m===95||Oe(m)?(o=!0,e.consume(m),u):p(m)}function d(m){return e.consume(m),i=!0,u}function p(m){return o&&i&&Ce(r.previous)?(e.exit("literalAutolinkEmail"),
e.exit("literalAutolink"),t(m)):n(m)}}function Op(e,t,n){let r=this;return i;function i(a){return a!==87&&a!==119||!ns.call(r,r.previous)||ri(r.events)?n(a):(e.
enter("literalAutolink"),e.enter("literalAutolinkWww"),e.check(Tp,e.attempt(Qo,e.attempt(jo,o),n),n)(a))}function o(a){return e.exit("literalAutolinkWww"),e.exit(
"literalAutolink"),t(a)}}function Ip(e,t,n){let r=this,i="",o=!1;return a;function a(m){return(m===72||m===104)&&rs.call(r,r.previous)&&!ri(r.events)?(e.enter("\
literalAutolink"),e.enter("literalAutolinkHttp"),i+=String.fromCodePoint(m),e.consume(m),l):n(m)}function l(m){if(Ce(m)&&i.length<5)return i+=String.fromCodePoint(
m),e.consume(m),l;if(m===58){let h=i.toLowerCase();if(h==="http"||h==="https")return e.consume(m),u}return n(m)}function u(m){return m===47?(e.consume(m),o?d:(o=
!0,u)):n(m)}function d(m){return m===null||Et(m)||ce(m)||tt(m)||ft(m)?n(m):e.attempt(Qo,e.attempt(jo,p),n)(m)}function p(m){return e.exit("literalAutolinkHttp"),
e.exit("literalAutolink"),t(m)}}function Rp(e,t,n){let r=0;return i;function i(a){return(a===87||a===119)&&r<3?(r++,e.consume(a),i):a===46&&r===3?(e.consume(a),
o):n(a)}function o(a){return a===null?n(a):t(a)}}function Dp(e,t,n){let r,i,o;return a;function a(d){return d===46||d===95?e.check(Jo,u,l)(d):d===null||ce(d)||tt(
d)||d!==45&&ft(d)?u(d):(o=!0,e.consume(d),a)}function l(d){return d===95?r=!0:(i=r,r=void 0),e.consume(d),a}function u(d){return i||r||!o?n(d):t(d)}}function Mp(e,t){
let n=0,r=0;return i;function i(a){return a===40?(n++,e.consume(a),i):a===41&&r<n?o(a):a===33||a===34||a===38||a===39||a===41||a===42||a===44||a===46||a===58||a===
59||a===60||a===63||a===93||a===95||a===126?e.check(Jo,t,o)(a):a===null||ce(a)||tt(a)?t(a):(e.consume(a),i)}function o(a){return a===41&&r++,e.consume(a),i}}function Lp(e,t,n){
return r;function r(l){return l===33||l===34||l===39||l===41||l===42||l===44||l===46||l===58||l===59||l===63||l===95||l===126?(e.consume(l),r):l===38?(e.consume(
l),o):l===93?(e.consume(l),i):l===60||l===null||ce(l)||tt(l)?t(l):n(l)}function i(l){return l===null||l===40||l===91||ce(l)||tt(l)?t(l):r(l)}function o(l){return Ce(
l)?a(l):n(l)}function a(l){return l===59?(e.consume(l),r):Ce(l)?(e.consume(l),a):n(l)}}function Bp(e,t,n){return r;function r(o){return e.consume(o),i}function i(o){
return Oe(o)?n(o):t(o)}}function ns(e){return e===null||e===40||e===42||e===95||e===91||e===93||e===126||ce(e)}function rs(e){return!Ce(e)}function is(e){return!(e===
47||ti(e))}function ti(e){return e===43||e===45||e===46||e===95||Oe(e)}function ri(e){let t=e.length,n=!1;for(;t--;){let r=e[t][1];if((r.type==="labelLink"||r.type===
"labelImage")&&!r._balanced){n=!0;break}if(r._gfmAutolinkLiteralWalkedInto){n=!1;break}}return e.length>0&&!n&&(e[e.length-1][1]._gfmAutolinkLiteralWalkedInto=!0),
n}var qp={tokenize:Hp,partial:!0};function ii(){return{document:{91:{name:"gfmFootnoteDefinition",tokenize:Up,continuation:{tokenize:$p},exit:Gp}},text:{91:{name:"\
gfmFootnoteCall",tokenize:zp},93:{name:"gfmPotentialFootnoteCall",add:"after",tokenize:Fp,resolveTo:Pp}}}}function Fp(e,t,n){let r=this,i=r.events.length,o=r.parser.
gfmFootnotes||(r.parser.gfmFootnotes=[]),a;for(;i--;){let u=r.events[i][1];if(u.type==="labelImage"){a=u;break}if(u.type==="gfmFootnoteCall"||u.type==="labelLin\
k"||u.type==="label"||u.type==="image"||u.type==="link")break}return l;function l(u){if(!a||!a._balanced)return n(u);let d=Me(r.sliceSerialize({start:a.end,end:r.
now()}));return d.codePointAt(0)!==94||!o.includes(d.slice(1))?n(u):(e.enter("gfmFootnoteCallLabelMarker"),e.consume(u),e.exit("gfmFootnoteCallLabelMarker"),t(u))}}
function Pp(e,t){let n=e.length,r;for(;n--;)if(e[n][1].type==="labelImage"&&e[n][0]==="enter"){r=e[n][1];break}e[n+1][1].type="data",e[n+3][1].type="gfmFootnote\
CallLabelMarker";let i={type:"gfmFootnoteCall",start:Object.assign({},e[n+3][1].start),end:Object.assign({},e[e.length-1][1].end)},o={type:"gfmFootnoteCallMarke\
r",start:Object.assign({},e[n+3][1].end),end:Object.assign({},e[n+3][1].end)};o.end.column++,o.end.offset++,o.end._bufferIndex++;let a={type:"gfmFootnoteCallStr\
ing",start:Object.assign({},o.end),end:Object.assign({},e[e.length-1][1].start)},l={type:"chunkString",contentType:"string",start:Object.assign({},a.start),end:Object.
assign({},a.end)},u=[e[n+1],e[n+2],["enter",i,t],e[n+3],e[n+4],["enter",o,t],["exit",o,t],["enter",a,t],["enter",l,t],["exit",l,t],["exit",a,t],e[e.length-2],e[e.
length-1],["exit",i,t]];return e.splice(n,e.length-n+1,...u),e}function zp(e,t,n){let r=this,i=r.parser.gfmFootnotes||(r.parser.gfmFootnotes=[]),o=0,a;return l;
function l(m){return e.enter("gfmFootnoteCall"),e.enter("gfmFootnoteCallLabelMarker"),e.consume(m),e.exit("gfmFootnoteCallLabelMarker"),u}function u(m){return m!==
94?n(m):(e.enter("gfmFootnoteCallMarker"),e.consume(m),e.exit("gfmFootnoteCallMarker"),e.enter("gfmFootnoteCallString"),e.enter("chunkString").contentType="stri\
ng",d)}function d(m){if(o>999||m===93&&!a||m===null||m===91||ce(m))return n(m);if(m===93){e.exit("chunkString");let h=e.exit("gfmFootnoteCallString");return i.includes(
Me(r.sliceSerialize(h)))?(e.enter("gfmFootnoteCallLabelMarker"),e.consume(m),e.exit("gfmFootnoteCallLabelMarker"),e.exit("gfmFootnoteCall"),t):n(m)}return ce(m)||
(a=!0),o++,e.consume(m),m===92?p:d}function p(m){return m===91||m===92||m===93?(e.consume(m),o++,d):d(m)}}function Up(e,t,n){let r=this,i=r.parser.gfmFootnotes||
(r.parser.gfmFootnotes=[]),o,a=0,l;return u;function u(_){return e.enter("gfmFootnoteDefinition")._container=!0,e.enter("gfmFootnoteDefinitionLabel"),e.enter("g\
fmFootnoteDefinitionLabelMarker"),e.consume(_),e.exit("gfmFootnoteDefinitionLabelMarker"),d}function d(_){return _===94?(e.enter("gfmFootnoteDefinitionMarker"),
e.consume(_),e.exit("gfmFootnoteDefinitionMarker"),e.enter("gfmFootnoteDefinitionLabelString"),e.enter("chunkString").contentType="string",p):n(_)}function p(_){
if(a>999||_===93&&!l||_===null||_===91||ce(_))return n(_);if(_===93){e.exit("chunkString");let C=e.exit("gfmFootnoteDefinitionLabelString");return o=Me(r.sliceSerialize(
C)),e.enter("gfmFootnoteDefinitionLabelMarker"),e.consume(_),e.exit("gfmFootnoteDefinitionLabelMarker"),e.exit("gfmFootnoteDefinitionLabel"),h}return ce(_)||(l=
!0),a++,e.consume(_),_===92?m:p}function m(_){return _===91||_===92||_===93?(e.consume(_),a++,p):p(_)}function h(_){return _===58?(e.enter("definitionMarker"),e.
consume(_),e.exit("definitionMarker"),i.includes(o)||i.push(o),ee(e,f,"gfmFootnoteDefinitionWhitespace")):n(_)}function f(_){return t(_)}}function $p(e,t,n){return e.
check(nt,t,e.attempt(qp,t,n))}function Gp(e){e.exit("gfmFootnoteDefinition")}function Hp(e,t,n){let r=this;return ee(e,i,"gfmFootnoteDefinitionIndent",5);function i(o){
let a=r.events[r.events.length-1];return a&&a[1].type==="gfmFootnoteDefinitionIndent"&&a[2].sliceSerialize(a[1],!0).length===4?t(o):n(o)}}function ai(e){let n=(e||{}).singleTilde,r={name:"strikethrough",tokenize:o,resolveAll:i};return n==null&&(n=!0),{text:{126:r},insideSpan:{null:[r]},attentionMarkers:{
null:[126]}};function i(a,l){let u=-1;for(;++u<a.length;)if(a[u][0]==="enter"&&a[u][1].type==="strikethroughSequenceTemporary"&&a[u][1]._close){let d=u;for(;d--;)
if(a[d][0]==="exit"&&a[d][1].type==="strikethroughSequenceTemporary"&&a[d][1]._open&&a[u][1].end.offset-a[u][1].start.offset===a[d][1].end.offset-a[d][1].start.
offset){a[u][1].type="strikethroughSequence",a[d][1].type="strikethroughSequence";let p={type:"strikethrough",start:Object.assign({},a[d][1].start),end:Object.assign(
{},a[u][1].end)},m={type:"strikethroughText",start:Object.assign({},a[d][1].end),end:Object.assign({},a[u][1].start)},h=[["enter",p,l],["enter",a[d][1],l],["exi\
t",a[d][1],l],["enter",m,l]],f=l.parser.constructs.insideSpan.null;f&&Re(h,h.length,0,bt(f,a.slice(d+1,u),l)),Re(h,h.length,0,[["exit",m,l],["enter",a[u][1],l],
["exit",a[u][1],l],["exit",p,l]]),Re(a,d-1,u-d+3,h),u=d+h.length-2;break}}for(u=-1;++u<a.length;)a[u][1].type==="strikethroughSequenceTemporary"&&(a[u][1].type=
"data");return a}function o(a,l,u){let d=this.previous,p=this.events,m=0;return h;function h(_){return d===126&&p[p.length-1][1].type!=="characterEscape"?u(_):(a.
enter("strikethroughSequenceTemporary"),f(_))}function f(_){let C=Ut(d);if(_===126)return m>1?u(_):(a.consume(_),m++,f);if(m<2&&!n)return u(_);let T=a.exit("str\
ikethroughSequenceTemporary"),E=Ut(_);return T._open=!E||E===2&&!!C,T._close=!C||C===2&&!!E,l(_)}}}var Wn=class{constructor(){this.map=[],this.index=new Map}add(t,n,r){Kp(this,t,n,r)}consume(t){if(this.map.sort(function(o,a){return o[0]-a[0]}),this.map.length===
0)return;let n=this.map.length,r=[];for(;n>0;)n-=1,r.push(t.slice(this.map[n][0]+this.map[n][1]),this.map[n][2]),t.length=this.map[n][0];r.push(t.slice()),t.length=
0;let i=r.pop();for(;i;){for(let o of i)t.push(o);i=r.pop()}this.map.length=0,this.index.clear()}};function Kp(e,t,n,r){if(n===0&&r.length===0)return;let i=e.index.
get(t);if(i){i[1]+=n,i[2].push(...r);return}let o=[t,n,r];e.map.push(o),e.index.set(t,o)}function as(e,t){let n=!1,r=[];for(;t<e.length;){let i=e[t];if(n){if(i[0]==="enter")i[1].type==="tableContent"&&r.push(e[t+1][1].type==="tableDelimiterMarker"?"\
left":"none");else if(i[1].type==="tableContent"){if(e[t-1][1].type==="tableDelimiterMarker"){let o=r.length-1;r[o]=r[o]==="left"?"center":"right"}}else if(i[1].
type==="tableDelimiterRow")break}else i[0]==="enter"&&i[1].type==="tableDelimiterRow"&&(n=!0);t+=1}return r}function oi(){return{flow:{null:{name:"table",tokenize:Wp,resolveAll:Vp}}}}function Wp(e,t,n){let r=this,i=0,o=0,a;return l;function l(O){let oe=r.events.length-
1;for(;oe>-1;){let{type:j}=r.events[oe][1];if(j==="lineEnding"||j==="linePrefix")oe--;else break}let ie=oe>-1?r.events[oe][1].type:null,W=ie==="tableHead"||ie===
"tableRow"?A:u;return W===A&&r.parser.lazy[r.now().line]?n(O):W(O)}function u(O){return e.enter("tableHead"),e.enter("tableRow"),d(O)}function d(O){return O===124||
(a=!0,o+=1),p(O)}function p(O){return O===null?n(O):$(O)?o>1?(o=0,r.interrupt=!0,e.exit("tableRow"),e.enter("lineEnding"),e.consume(O),e.exit("lineEnding"),f):n(
O):te(O)?ee(e,p,"whitespace")(O):(o+=1,a&&(a=!1,i+=1),O===124?(e.enter("tableCellDivider"),e.consume(O),e.exit("tableCellDivider"),a=!0,p):(e.enter("data"),m(O)))}
function m(O){return O===null||O===124||ce(O)?(e.exit("data"),p(O)):(e.consume(O),O===92?h:m)}function h(O){return O===92||O===124?(e.consume(O),m):m(O)}function f(O){
return r.interrupt=!1,r.parser.lazy[r.now().line]?n(O):(e.enter("tableDelimiterRow"),a=!1,te(O)?ee(e,_,"linePrefix",r.parser.constructs.disable.null.includes("c\
odeIndented")?void 0:4)(O):_(O))}function _(O){return O===45||O===58?T(O):O===124?(a=!0,e.enter("tableCellDivider"),e.consume(O),e.exit("tableCellDivider"),C):z(
O)}function C(O){return te(O)?ee(e,T,"whitespace")(O):T(O)}function T(O){return O===58?(o+=1,a=!0,e.enter("tableDelimiterMarker"),e.consume(O),e.exit("tableDeli\
miterMarker"),E):O===45?(o+=1,E(O)):O===null||$(O)?q(O):z(O)}function E(O){return O===45?(e.enter("tableDelimiterFiller"),v(O)):z(O)}function v(O){return O===45?
(e.consume(O),v):O===58?(a=!0,e.exit("tableDelimiterFiller"),e.enter("tableDelimiterMarker"),e.consume(O),e.exit("tableDelimiterMarker"),D):(e.exit("tableDelimi\
terFiller"),D(O))}function D(O){return te(O)?ee(e,q,"whitespace")(O):q(O)}function q(O){return O===124?_(O):O===null||$(O)?!a||i!==o?z(O):(e.exit("tableDelimite\
rRow"),e.exit("tableHead"),t(O)):z(O)}function z(O){return n(O)}function A(O){return e.enter("tableRow"),Z(O)}function Z(O){return O===124?(e.enter("tableCellDi\
vider"),e.consume(O),e.exit("tableCellDivider"),Z):O===null||$(O)?(e.exit("tableRow"),t(O)):te(O)?ee(e,Z,"whitespace")(O):(e.enter("data"),Y(O))}function Y(O){return O===
null||O===124||ce(O)?(e.exit("data"),Z(O)):(e.consume(O),O===92?X:Y)}function X(O){return O===92||O===124?(e.consume(O),Y):Y(O)}}function Vp(e,t){let n=-1,r=!0,
i=0,o=[0,0,0,0],a=[0,0,0,0],l=!1,u=0,d,p,m,h=new Wn;for(;++n<e.length;){let f=e[n],_=f[1];f[0]==="enter"?_.type==="tableHead"?(l=!1,u!==0&&(os(h,t,u,d,p),p=void 0,
u=0),d={type:"table",start:Object.assign({},_.start),end:Object.assign({},_.end)},h.add(n,0,[["enter",d,t]])):_.type==="tableRow"||_.type==="tableDelimiterRow"?
(r=!0,m=void 0,o=[0,0,0,0],a=[0,n+1,0,0],l&&(l=!1,p={type:"tableBody",start:Object.assign({},_.start),end:Object.assign({},_.end)},h.add(n,0,[["enter",p,t]])),i=
_.type==="tableDelimiterRow"?2:p?3:1):i&&(_.type==="data"||_.type==="tableDelimiterMarker"||_.type==="tableDelimiterFiller")?(r=!1,a[2]===0&&(o[1]!==0&&(a[0]=a[1],
m=Vn(h,t,o,i,void 0,m),o=[0,0,0,0]),a[2]=n)):_.type==="tableCellDivider"&&(r?r=!1:(o[1]!==0&&(a[0]=a[1],m=Vn(h,t,o,i,void 0,m)),o=a,a=[o[1],n,0,0])):_.type==="t\
ableHead"?(l=!0,u=n):_.type==="tableRow"||_.type==="tableDelimiterRow"?(u=n,o[1]!==0?(a[0]=a[1],m=Vn(h,t,o,i,n,m)):a[1]!==0&&(m=Vn(h,t,a,i,n,m)),i=0):i&&(_.type===
"data"||_.type==="tableDelimiterMarker"||_.type==="tableDelimiterFiller")&&(a[3]=n)}for(u!==0&&os(h,t,u,d,p),h.consume(t.events),n=-1;++n<t.events.length;){let f=t.
events[n];f[0]==="enter"&&f[1].type==="table"&&(f[1]._align=as(t.events,n))}return e}function Vn(e,t,n,r,i,o){let a=r===1?"tableHeader":r===2?"tableDelimiter":"\
tableData",l="tableContent";n[0]!==0&&(o.end=Object.assign({},Ht(t.events,n[0])),e.add(n[0],0,[["exit",o,t]]));let u=Ht(t.events,n[1]);if(o={type:a,start:Object.
assign({},u),end:Object.assign({},u)},e.add(n[1],0,[["enter",o,t]]),n[2]!==0){let d=Ht(t.events,n[2]),p=Ht(t.events,n[3]),m={type:l,start:Object.assign({},d),end:Object.
assign({},p)};if(e.add(n[2],0,[["enter",m,t]]),r!==2){let h=t.events[n[2]],f=t.events[n[3]];if(h[1].end=Object.assign({},f[1].end),h[1].type="chunkText",h[1].contentType=
"text",n[3]>n[2]+1){let _=n[2]+1,C=n[3]-n[2]-1;e.add(_,C,[])}}e.add(n[3]+1,0,[["exit",m,t]])}return i!==void 0&&(o.end=Object.assign({},Ht(t.events,i)),e.add(i,
0,[["exit",o,t]]),o=void 0),o}function os(e,t,n,r,i){let o=[],a=Ht(t.events,n);i&&(i.end=Object.assign({},a),o.push(["exit",i,t])),r.end=Object.assign({},a),o.push(
["exit",r,t]),e.add(n+1,0,o)}function Ht(e,t){let n=e[t],r=n[0]==="enter"?"start":"end";return n[1][r]}var Zp={name:"tasklistCheck",tokenize:Yp};function si(){return{text:{91:Zp}}}function Yp(e,t,n){let r=this;return i;function i(u){return r.previous!==null||!r._gfmTasklistFirstContentOfListItem?
n(u):(e.enter("taskListCheck"),e.enter("taskListCheckMarker"),e.consume(u),e.exit("taskListCheckMarker"),o)}function o(u){return ce(u)?(e.enter("taskListCheckVa\
lueUnchecked"),e.consume(u),e.exit("taskListCheckValueUnchecked"),a):u===88||u===120?(e.enter("taskListCheckValueChecked"),e.consume(u),e.exit("taskListCheckVal\
ueChecked"),a):n(u)}function a(u){return u===93?(e.enter("taskListCheckMarker"),e.consume(u),e.exit("taskListCheckMarker"),e.exit("taskListCheck"),l):n(u)}function l(u){
return $(u)?t(u):te(u)?e.check({tokenize:Xp},t,n)(u):n(u)}}function Xp(e,t,n){return ee(e,r,"whitespace");function r(i){return i===null?n(i):t(i)}}function Qp(e){return Rn([ni(),ii(),ai(e),oi(),si()])}var ls={tokenize:jp,concrete:!0,name:"mathFlow"},ss={tokenize:Jp,partial:!0};function jp(e,t,n){let r=this,i=r.events[r.events.length-1],o=i&&i[1].type==="lineP\
refix"?i[2].sliceSerialize(i[1],!0).length:0,a=0;return l;function l(v){return e.enter("mathFlow"),e.enter("mathFlowFence"),e.enter("mathFlowFenceSequence"),u(v)}
function u(v){return v===36?(e.consume(v),a++,u):a<2?n(v):(e.exit("mathFlowFenceSequence"),ee(e,d,"whitespace")(v))}function d(v){return v===null||$(v)?m(v):(e.
enter("mathFlowFenceMeta"),e.enter("chunkString",{contentType:"string"}),p(v))}function p(v){return v===null||$(v)?(e.exit("chunkString"),e.exit("mathFlowFenceM\
eta"),m(v)):v===36?n(v):(e.consume(v),p)}function m(v){return e.exit("mathFlowFence"),r.interrupt?t(v):e.attempt(ss,h,T)(v)}function h(v){return e.attempt({tokenize:E,
partial:!0},T,f)(v)}function f(v){return(o?ee(e,_,"linePrefix",o+1):_)(v)}function _(v){return v===null?T(v):$(v)?e.attempt(ss,h,T)(v):(e.enter("mathFlowValue"),
C(v))}function C(v){return v===null||$(v)?(e.exit("mathFlowValue"),_(v)):(e.consume(v),C)}function T(v){return e.exit("mathFlow"),t(v)}function E(v,D,q){let z=0;
return ee(v,A,"linePrefix",r.parser.constructs.disable.null.includes("codeIndented")?void 0:4);function A(X){return v.enter("mathFlowFence"),v.enter("mathFlowFe\
nceSequence"),Z(X)}function Z(X){return X===36?(z++,v.consume(X),Z):z<a?q(X):(v.exit("mathFlowFenceSequence"),ee(v,Y,"whitespace")(X))}function Y(X){return X===
null||$(X)?(v.exit("mathFlowFence"),D(X)):q(X)}}}function Jp(e,t,n){let r=this;return i;function i(a){return a===null?t(a):(e.enter("lineEnding"),e.consume(a),e.
exit("lineEnding"),o)}function o(a){return r.parser.lazy[r.now().line]?n(a):t(a)}}function cs(e){let n=(e||{}).singleDollarTextMath;return n==null&&(n=!0),{tokenize:r,resolve:em,previous:tm,name:"mathText"};function r(i,o,a){let l=this,u=0,d,
p;return m;function m(T){return i.enter("mathText"),i.enter("mathTextSequence"),h(T)}function h(T){return T===36?(i.consume(T),u++,h):u<2&&!n?a(T):(i.exit("math\
TextSequence"),f(T))}function f(T){return T===null?a(T):T===36?(p=i.enter("mathTextSequence"),d=0,C(T)):T===32?(i.enter("space"),i.consume(T),i.exit("space"),f):
$(T)?(i.enter("lineEnding"),i.consume(T),i.exit("lineEnding"),f):(i.enter("mathTextData"),_(T))}function _(T){return T===null||T===32||T===36||$(T)?(i.exit("mat\
hTextData"),f(T)):(i.consume(T),_)}function C(T){return T===36?(i.consume(T),d++,C):d===u?(i.exit("mathTextSequence"),i.exit("mathText"),o(T)):(p.type="mathText\
Data",_(T))}}}function em(e){let t=e.length-4,n=3,r,i;if((e[n][1].type==="lineEnding"||e[n][1].type==="space")&&(e[t][1].type==="lineEnding"||e[t][1].type==="sp\
ace")){for(r=n;++r<t;)if(e[r][1].type==="mathTextData"){e[t][1].type="mathTextPadding",e[n][1].type="mathTextPadding",n+=2,t-=2;break}}for(r=n-1,t++;++r<=t;)i===
void 0?r!==t&&e[r][1].type!=="lineEnding"&&(i=r):(r===t||e[r][1].type==="lineEnding")&&(e[i][1].type="mathTextData",r!==i+2&&(e[i][1].end=e[r-1][1].end,e.splice(
i+2,r-i-2),t-=r-i-2,r=i+2),i=void 0);return e}function tm(e){return e!==36||this.events[this.events.length-1][1].type==="characterEscape"}function us(e){return{flow:{36:ls},text:{36:cs(e)}}}var B=class e{constructor(t,n){let r=" "+t,i,o=n&&n.loc;if(o&&o.start<=o.end){let l=o.lexer.input;i=o.start;let u=o.end;i===l.length?r+=" at end of input: ":r+=
" at position "+(i+1)+`: 
`;let d=l.slice(i,u).replace(/[^]/g,"$&\u0332"),p;i>15?p="\u2026"+l.slice(i-15,i):p=l.slice(0,i);let m;u+15<l.length?m=l.slice(u,u+15)+"\u2026":m=l.slice(u),r+=
p+d+m}let a=new Error(r);return a.name="ParseError",a.__proto__=e.prototype,a.position=i,a}};B.prototype.__proto__=Error.prototype;var Xe=function(e,t,n){if(!Object.
prototype.hasOwnProperty.call(e,t))return n;let r=e[t];return r===void 0?n:r},nm=/([A-Z])/g,Ai=function(e){return e.replace(nm,"-$1").toLowerCase()},rm={"&":"&a\
mp;",">":"&gt;","<":"&lt;",'"':"&quot;","'":"&#x27;"},im=/[&><"']/g;function pt(e){return String(e).replace(im,t=>rm[t])}var Jn=function(e){return e.type==="ord\
group"||e.type==="color"?e.body.length===1?Jn(e.body[0]):e:e.type==="font"?Jn(e.body):e},sr=function(e){let t=Jn(e);return t.type==="mathord"||t.type==="textord"||
t.type==="atom"},am=function(e){if(!e)throw new Error("Expected non-null, but got "+String(e));return e},om=function(e){let t=/^[\x00-\x20]*([^\\/#?]*?)(:|&#0*58|&#x0*3a|&colon)/i.
exec(e);return t?t[2]!==":"||!/^[a-zA-Z][a-zA-Z0-9+\-.]*$/.test(t[1])?null:t[1].toLowerCase():"_relative"},li=function(e){return+e.toFixed(4)},Ks="aceg\u0131\u0237mnopqrs\
uvwxyz\u03B1\u03B3\u03B5\u03B7\u03B9\u03BA\u03BC\u03BD\u03BF\u03C0\u03C1\u03C2\u03C3\u03C4\u03C5\u03C7\u03C9\u03D5\u{1D41A}\u{1D41C}\u{1D41E}\u{1D420}\u{1D426}\u{1D427}\u{1D428}\u{1D429}\u{1D42A}\u{1D42B}\u{1D42C}\u{1D42E}\u{1D42F}\u{1D430}\u{1D431}\u{1D432}\u{1D433}",
sm=["__proto__","prototype","constructor"],lm=e=>{if(e==null||typeof e!="object")return Object.create(null);for(let t of sm)Object.prototype.hasOwnProperty.call(
e,t)&&delete e[t];return Object.setPrototypeOf(e,null)},dn=class{constructor(t){t=t||{},this.displayMode=Xe(t,"displayMode",!1),this.annotate=Xe(t,"annotate",!1),
this.leqno=Xe(t,"leqno",!1),this.throwOnError=Xe(t,"throwOnError",!1),this.errorColor=Xe(t,"errorColor","#b22222"),this.macros=lm(Object.prototype.hasOwnProperty.
call(t,"macros")?t.macros:void 0),this.wrap=Xe(t,"wrap","none"),this.xml=Xe(t,"xml",!1),this.colorIsTextColor=Xe(t,"colorIsTextColor",!1),this.strict=Xe(t,"stri\
ct",!1),this.trust=Xe(t,"trust",!1);let n=Object.prototype.hasOwnProperty.call(t,"maxSize")?t.maxSize:void 0;this.maxSize=n===void 0?[1/0,1/0]:Array.isArray(n)?
n:[1/0,1/0],this.maxExpand=Math.max(0,Xe(t,"maxExpand",1e3)),this.wrapDelimiterPairs=!0}isTrusted(t){if(t.url&&!t.protocol){let r=om(t.url);if(r==null)return!1;
t.protocol=r}return!!(typeof this.trust=="function"?this.trust(t):this.trust)}},Ws={},er={};function U({type:e,names:t,props:n,handler:r,mathmlBuilder:i}){let o={
type:e,numArgs:n.numArgs,argTypes:n.argTypes,allowedInArgument:!!n.allowedInArgument,allowedInText:!!n.allowedInText,allowedInMath:n.allowedInMath===void 0?!0:n.
allowedInMath,numOptionalArgs:n.numOptionalArgs||0,infix:!!n.infix,primitive:!!n.primitive,handler:r};for(let a=0;a<t.length;++a)Ws[t[a]]=o;e&&i&&(er[e]=i)}function Ot({
type:e,mathmlBuilder:t}){U({type:e,names:[],props:{numArgs:0},handler(){throw new Error("Should never be called.")},mathmlBuilder:t})}var pn=function(e){return e.
type==="ordgroup"&&e.body.length===1?e.body[0]:e},Ie=function(e){return e.type==="ordgroup"?e.body:[e]},mn=class{constructor(t){this.children=t,this.classes=[],
this.style={}}hasClass(t){return this.classes.includes(t)}toNode(){let t=document.createDocumentFragment();for(let n=0;n<this.children.length;n++)t.appendChild(
this.children[n].toNode());return t}toMarkup(){let t="";for(let n=0;n<this.children.length;n++)t+=this.children[n].toMarkup();return t}toText(){let t=n=>n.toText();
return this.children.map(t).join("")}},Wt=function(e){return e.filter(t=>t).join(" ")},cm=function(e,t){this.classes=e||[],this.attributes={},this.style=t||{}},
um=function(e){let t=document.createElement(e);t.className=Wt(this.classes);for(let n in this.style)Object.prototype.hasOwnProperty.call(this.style,n)&&(t.style[n]=
this.style[n]);for(let n in this.attributes)Object.prototype.hasOwnProperty.call(this.attributes,n)&&t.setAttribute(n,this.attributes[n]);for(let n=0;n<this.children.
length;n++)t.appendChild(this.children[n].toNode());return t},dm=function(e){let t=`<${e}`;this.classes.length&&(t+=` class="${pt(Wt(this.classes))}"`);let n="";
for(let r in this.style)Object.prototype.hasOwnProperty.call(this.style,r)&&(n+=`${Ai(r)}:${this.style[r]};`);n&&(t+=` style="${n}"`);for(let r in this.attributes)
Object.prototype.hasOwnProperty.call(this.attributes,r)&&(t+=` ${r}="${pt(this.attributes[r])}"`);t+=">";for(let r=0;r<this.children.length;r++)t+=this.children[r].
toMarkup();return t+=`</${e}>`,t},tr=class{constructor(t,n,r){cm.call(this,t,r),this.children=n||[]}setAttribute(t,n){this.attributes[t]=n}toNode(){return um.call(
this,"span")}toMarkup(){return dm.call(this,"span")}},pm=class{constructor(t){this.text=t}toNode(){return document.createTextNode(this.text)}toMarkup(){return pt(
this.text)}},nr=class{constructor(t,n,r){this.href=t,this.classes=n,this.children=r||[]}toNode(){let t=document.createElement("a");t.setAttribute("href",this.href),
this.classes.length>0&&(t.className=Wt(this.classes));for(let n=0;n<this.children.length;n++)t.appendChild(this.children[n].toNode());return t}toMarkup(){let t=`\
<a href='${pt(this.href)}'`;this.classes.length>0&&(t+=` class="${pt(Wt(this.classes))}"`),t+=">";for(let n=0;n<this.children.length;n++)t+=this.children[n].toMarkup();
return t+="</a>",t}},fi=class{constructor(t,n,r){this.alt=n,this.src=t,this.classes=["mord"],this.style=r}hasClass(t){return this.classes.includes(t)}toNode(){let t=document.
createElement("img");t.src=this.src,t.alt=this.alt,t.className="mord";for(let n in this.style)Object.prototype.hasOwnProperty.call(this.style,n)&&(t.style[n]=this.
style[n]);return t}toMarkup(){let t=`<img src='${this.src}' alt='${this.alt}'`,n="";for(let r in this.style)Object.prototype.hasOwnProperty.call(this.style,r)&&
(n+=`${Ai(r)}:${this.style[r]};`);return n&&(t+=` style="${pt(n)}"`),t+=">",t}};function Ct(e){return new mn(e)}var S=class{constructor(t,n,r,i){this.type=t,this.
attributes={},this.children=n||[],this.classes=r||[],this.style=i||{},this.label=""}setAttribute(t,n){this.attributes[t]=n}getAttribute(t){return this.attributes[t]}setLabel(t){
this.label=t}toNode(){let t=document.createElementNS("http://www.w3.org/1998/Math/MathML",this.type);for(let n in this.attributes)Object.prototype.hasOwnProperty.
call(this.attributes,n)&&t.setAttribute(n,this.attributes[n]);this.classes.length>0&&(t.className=Wt(this.classes));for(let n in this.style)Object.prototype.hasOwnProperty.
call(this.style,n)&&(t.style[n]=this.style[n]);for(let n=0;n<this.children.length;n++)t.appendChild(this.children[n].toNode());return t}toMarkup(){let t="<"+this.
type;for(let r in this.attributes)Object.prototype.hasOwnProperty.call(this.attributes,r)&&(t+=" "+r+'="',t+=pt(this.attributes[r]),t+='"');this.classes.length>
0&&(t+=` class="${pt(Wt(this.classes))}"`);let n="";for(let r in this.style)Object.prototype.hasOwnProperty.call(this.style,r)&&(n+=`${Ai(r)}:${this.style[r]};`);
n&&(t+=` style="${n}"`),t+=">";for(let r=0;r<this.children.length;r++)t+=this.children[r].toMarkup();return t+="</"+this.type+">",t}toText(){return this.children.
map(t=>t.toText()).join("")}},Ne=class{constructor(t){this.text=t}toNode(){return document.createTextNode(this.text)}toMarkup(){return pt(this.toText())}toText(){
return this.text}},Ti=e=>{let t;return e.length===1&&e[0].type==="mrow"?(t=e.pop(),t.type="mstyle"):t=new S("mstyle",e),t},Tt=e=>{let t=0;if(e.body&&Array.isArray(
e.body))for(let n of e.body)t+=Tt(n);else if(e.body)t+=Tt(e.body);else if(e.type==="supsub")t+=Tt(e.base),e.sub&&(t+=.7*Tt(e.sub)),e.sup&&(t+=.7*Tt(e.sup));else if(e.
type==="mathord"||e.type==="textord")for(let n of e.text.split("")){let r=n.codePointAt(0);96<r&&r<123||944<r&&r<970?t+=.56:47<r&&r<58?t+=.5:t+=.92}else t+=1;return t},
mm={widehat:"\u02C6",widecheck:"\u02C7",widetilde:"~",wideparen:"\u23DC",utilde:"~",overleftarrow:"\u2190",underleftarrow:"\u2190",xleftarrow:"\u2190",overrightarrow:"\
\u2192",underrightarrow:"\u2192",xrightarrow:"\u2192",underbrace:"\u23DF",overbrace:"\u23DE",overbracket:"\u23B4",underbracket:"\u23B5",overgroup:"\u23E0",overparen:"\
\u23DC",undergroup:"\u23E1",underparen:"\u23DD",overleftrightarrow:"\u2194",underleftrightarrow:"\u2194",xleftrightarrow:"\u2194",Overrightarrow:"\u21D2",xRightarrow:"\
\u21D2",overleftharpoon:"\u21BC",xleftharpoonup:"\u21BC",overrightharpoon:"\u21C0",xrightharpoonup:"\u21C0",xLeftarrow:"\u21D0",xLeftrightarrow:"\u21D4",xhookleftarrow:"\
\u21A9",xhookrightarrow:"\u21AA",xmapsto:"\u21A6",xrightharpoondown:"\u21C1",xleftharpoondown:"\u21BD",xtwoheadleftarrow:"\u219E",xtwoheadrightarrow:"\u21A0",xlongequal:"\
=",xrightleftarrows:"\u21C4",xtofrom:"\u21C4",xleftrightharpoons:"\u21CB",xrightleftharpoons:"\u21CC",yields:"\u2192",yieldsLeft:"\u2190",mesomerism:"\u2194",longrightharpoonup:"\
\u21C0",longleftharpoondown:"\u21BD",eqrightharpoonup:"\u21C0",eqleftharpoondown:"\u21BD","\\cdrightarrow":"\u2192","\\cdleftarrow":"\u2190","\\cdlongequal":"=",
yieldsLeftRight:"\u21C4",chemequilibrium:"\u21CC"},Ni=function(e){let t=new Ne(mm[e.slice(1)]),n=new S("mo",[t]);return n.setAttribute("stretchy","true"),n},hm=[
"\\widehat","\\widecheck"],Vs=e=>{let t=Ni(e.label);if(e.label.indexOf("tilde")>-1){let n=Tt(e.base);1<n&&n<1.6?t.classes.push("tml-tilde-2"):1.6<=n&&n<2.5?t.classes.
push("tml-tilde-3"):2.5<=n&&t.classes.push("tml-tilde-4")}else if(hm.includes(e.label)){let n=Tt(e.base);0<n&&n<=1?t.classes.push("tml-hat-1"):1<n&&n<1.6?t.classes.
push("tml-hat-2"):1.6<=n&&n<2.5?t.classes.push("tml-hat-3"):2.5<=n&&t.classes.push("tml-hat-4")}return t},fm={bin:1,close:1,inner:1,open:1,punct:1,rel:1},gm={"a\
ccent-token":1,mathord:1,"op-token":1,spacing:1,textord:1},Ee=Object.create(null);Ee.math=Object.create(null);Ee.text=Object.create(null);function s(e,t,n,r,i){
if(e!=="math"&&e!=="text")throw new TypeError(`Invalid mode: ${e} called in defineSymbol`);let o={group:t,replace:n};Ee[e][r]=o,i&&n&&(Ee[e][n]=o)}var c="math",
N="text",ue="accent-token",I="bin",ke="close",It="inner",F="mathord",se="op-token",Se="open",bn="punct",x="rel",mt="spacing",b="textord";s(c,x,"\u2261","\\equiv",
!0);s(c,x,"\u227A","\\prec",!0);s(c,x,"\u227B","\\succ",!0);s(c,x,"\u223C","\\sim",!0);s(c,x,"\u27C2","\\perp",!0);s(c,x,"\u2AAF","\\preceq",!0);s(c,x,"\u2AB0",
"\\succeq",!0);s(c,x,"\u2243","\\simeq",!0);s(c,x,"\u224C","\\backcong",!0);s(c,x,"|","\\mid",!0);s(c,x,"\u226A","\\ll",!0);s(c,x,"\u226B","\\gg",!0);s(c,x,"\u224D",
"\\asymp",!0);s(c,x,"\u2225","\\parallel");s(c,x,"\u2323","\\smile",!0);s(c,x,"\u2291","\\sqsubseteq",!0);s(c,x,"\u2292","\\sqsupseteq",!0);s(c,x,"\u2250","\\dot\
eq",!0);s(c,x,"\u2322","\\frown",!0);s(c,x,"\u220B","\\ni",!0);s(c,x,"\u220C","\\notni",!0);s(c,x,"\u221D","\\propto",!0);s(c,x,"\u22A2","\\vdash",!0);s(c,x,"\u22A3",
"\\dashv",!0);s(c,x,"\u220B","\\owns");s(c,x,"\u2258","\\arceq",!0);s(c,x,"\u2259","\\wedgeq",!0);s(c,x,"\u225A","\\veeeq",!0);s(c,x,"\u225B","\\stareq",!0);s(c,
x,"\u225D","\\eqdef",!0);s(c,x,"\u225E","\\measeq",!0);s(c,x,"\u225F","\\questeq",!0);s(c,x,"\u2260","\\ne",!0);s(c,x,"\u2260","\\neq");s(c,x,"\u2A75","\\eqeq",
!0);s(c,x,"\u2A76","\\eqeqeq",!0);s(c,x,"\u2237","\\dblcolon",!0);s(c,x,"\u2254","\\coloneqq",!0);s(c,x,"\u2255","\\eqqcolon",!0);s(c,x,"\u2239","\\eqcolon",!0);
s(c,x,"\u2A74","\\Coloneqq",!0);s(c,bn,".","\\ldotp");s(c,bn,"\xB7","\\cdotp");s(c,b,"#","\\#");s(N,b,"#","\\#");s(c,b,"&","\\&");s(N,b,"&","\\&");s(c,b,"\u2135",
"\\aleph",!0);s(c,b,"\u2200","\\forall",!0);s(c,b,"\u210F","\\hbar",!0);s(c,b,"\u2203","\\exists",!0);s(c,Se,"\u2207","\\nabla",!0);s(c,b,"\u266D","\\flat",!0);
s(c,b,"\u2113","\\ell",!0);s(c,b,"\u266E","\\natural",!0);s(c,b,"\u212B","\\Angstrom",!0);s(N,b,"\u212B","\\Angstrom",!0);s(c,b,"\u2663","\\clubsuit",!0);s(c,b,
"\u2667","\\varclubsuit",!0);s(c,b,"\u2118","\\wp",!0);s(c,b,"\u266F","\\sharp",!0);s(c,b,"\u2662","\\diamondsuit",!0);s(c,b,"\u2666","\\vardiamondsuit",!0);s(c,
b,"\u211C","\\Re",!0);s(c,b,"\u2661","\\heartsuit",!0);s(c,b,"\u2665","\\varheartsuit",!0);s(c,b,"\u2111","\\Im",!0);s(c,b,"\u2660","\\spadesuit",!0);s(c,b,"\u2664",
"\\varspadesuit",!0);s(c,b,"\u2640","\\female",!0);s(c,b,"\u2642","\\male",!0);s(c,b,"\xA7","\\S",!0);s(N,b,"\xA7","\\S");s(c,b,"\xB6","\\P",!0);s(N,b,"\xB6","\\\
P");s(N,b,"\u263A","\\smiley",!0);s(c,b,"\u263A","\\smiley",!0);s(c,b,"\u2020","\\dag");s(N,b,"\u2020","\\dag");s(N,b,"\u2020","\\textdagger");s(c,b,"\u2021","\\\
ddag");s(N,b,"\u2021","\\ddag");s(N,b,"\u2021","\\textdaggerdbl");s(c,ke,"\u23B1","\\rmoustache",!0);s(c,Se,"\u23B0","\\lmoustache",!0);s(c,ke,"\u27EF","\\rgroup",
!0);s(c,Se,"\u27EE","\\lgroup",!0);s(c,I,"\u2213","\\mp",!0);s(c,I,"\u2296","\\ominus",!0);s(c,I,"\u228E","\\uplus",!0);s(c,I,"\u2293","\\sqcap",!0);s(c,I,"\u2217",
"\\ast");s(c,I,"\u2294","\\sqcup",!0);s(c,I,"\u25EF","\\bigcirc",!0);s(c,I,"\u2219","\\bullet",!0);s(c,I,"\u2021","\\ddagger");s(c,I,"\u2240","\\wr",!0);s(c,I,"\
\u2A3F","\\amalg");s(c,I,"&","\\And");s(c,I,"\u2AFD","\\sslash",!0);s(c,x,"\u27F5","\\longleftarrow",!0);s(c,x,"\u21D0","\\Leftarrow",!0);s(c,x,"\u27F8","\\Longl\
eftarrow",!0);s(c,x,"\u27F6","\\longrightarrow",!0);s(c,x,"\u21D2","\\Rightarrow",!0);s(c,x,"\u27F9","\\Longrightarrow",!0);s(c,x,"\u2194","\\leftrightarrow",!0);
s(c,x,"\u27F7","\\longleftrightarrow",!0);s(c,x,"\u21D4","\\Leftrightarrow",!0);s(c,x,"\u27FA","\\Longleftrightarrow",!0);s(c,x,"\u21A4","\\mapsfrom",!0);s(c,x,
"\u21A6","\\mapsto",!0);s(c,x,"\u27FC","\\longmapsto",!0);s(c,x,"\u2197","\\nearrow",!0);s(c,x,"\u21A9","\\hookleftarrow",!0);s(c,x,"\u21AA","\\hookrightarrow",
!0);s(c,x,"\u2198","\\searrow",!0);s(c,x,"\u21BC","\\leftharpoonup",!0);s(c,x,"\u21C0","\\rightharpoonup",!0);s(c,x,"\u2199","\\swarrow",!0);s(c,x,"\u21BD","\\le\
ftharpoondown",!0);s(c,x,"\u21C1","\\rightharpoondown",!0);s(c,x,"\u2196","\\nwarrow",!0);s(c,x,"\u21CC","\\rightleftharpoons",!0);s(c,F,"\u21AF","\\lightning",
!0);s(c,F,"\u220E","\\QED",!0);s(c,F,"\u2030","\\permil",!0);s(N,b,"\u2030","\\permil");s(c,F,"\u2609","\\astrosun",!0);s(c,F,"\u263C","\\sun",!0);s(c,F,"\u263E",
"\\leftmoon",!0);s(c,F,"\u263D","\\rightmoon",!0);s(c,F,"\u2295","\\Earth");s(c,x,"\u226E","\\nless",!0);s(c,x,"\u2A87","\\lneq",!0);s(c,x,"\u2268","\\lneqq",!0);
s(c,x,"\u2268\uFE00","\\lvertneqq");s(c,x,"\u22E6","\\lnsim",!0);s(c,x,"\u2A89","\\lnapprox",!0);s(c,x,"\u2280","\\nprec",!0);s(c,x,"\u22E0","\\npreceq",!0);s(c,
x,"\u22E8","\\precnsim",!0);s(c,x,"\u2AB9","\\precnapprox",!0);s(c,x,"\u2241","\\nsim",!0);s(c,x,"\u2224","\\nmid",!0);s(c,x,"\u2224","\\nshortmid");s(c,x,"\u22AC",
"\\nvdash",!0);s(c,x,"\u22AD","\\nvDash",!0);s(c,x,"\u22EA","\\ntriangleleft");s(c,x,"\u22EC","\\ntrianglelefteq",!0);s(c,x,"\u2284","\\nsubset",!0);s(c,x,"\u2285",
"\\nsupset",!0);s(c,x,"\u228A","\\subsetneq",!0);s(c,x,"\u228A\uFE00","\\varsubsetneq");s(c,x,"\u2ACB","\\subsetneqq",!0);s(c,x,"\u2ACB\uFE00","\\varsubsetneqq");
s(c,x,"\u226F","\\ngtr",!0);s(c,x,"\u2A88","\\gneq",!0);s(c,x,"\u2269","\\gneqq",!0);s(c,x,"\u2269\uFE00","\\gvertneqq");s(c,x,"\u22E7","\\gnsim",!0);s(c,x,"\u2A8A",
"\\gnapprox",!0);s(c,x,"\u2281","\\nsucc",!0);s(c,x,"\u22E1","\\nsucceq",!0);s(c,x,"\u22E9","\\succnsim",!0);s(c,x,"\u2ABA","\\succnapprox",!0);s(c,x,"\u2246","\
\\ncong",!0);s(c,x,"\u2226","\\nparallel",!0);s(c,x,"\u2226","\\nshortparallel");s(c,x,"\u22AF","\\nVDash",!0);s(c,x,"\u22EB","\\ntriangleright");s(c,x,"\u22ED",
"\\ntrianglerighteq",!0);s(c,x,"\u228B","\\supsetneq",!0);s(c,x,"\u228B","\\varsupsetneq");s(c,x,"\u2ACC","\\supsetneqq",!0);s(c,x,"\u2ACC\uFE00","\\varsupsetneq\
q");s(c,x,"\u22AE","\\nVdash",!0);s(c,x,"\u2AB5","\\precneqq",!0);s(c,x,"\u2AB6","\\succneqq",!0);s(c,I,"\u22B4","\\unlhd");s(c,I,"\u22B5","\\unrhd");s(c,x,"\u219A",
"\\nleftarrow",!0);s(c,x,"\u219B","\\nrightarrow",!0);s(c,x,"\u21CD","\\nLeftarrow",!0);s(c,x,"\u21CF","\\nRightarrow",!0);s(c,x,"\u21AE","\\nleftrightarrow",!0);
s(c,x,"\u21CE","\\nLeftrightarrow",!0);s(c,x,"\u25B3","\\vartriangle");s(c,b,"\u210F","\\hslash");s(c,b,"\u25BD","\\triangledown");s(c,b,"\u25CA","\\lozenge");s(
c,b,"\u24C8","\\circledS");s(c,b,"\xAE","\\circledR",!0);s(N,b,"\xAE","\\circledR");s(N,b,"\xAE","\\textregistered");s(c,b,"\u2221","\\measuredangle",!0);s(c,b,
"\u2204","\\nexists");s(c,b,"\u2127","\\mho");s(c,b,"\u2132","\\Finv",!0);s(c,b,"\u2141","\\Game",!0);s(c,b,"\u2035","\\backprime");s(c,b,"\u2036","\\backdprime");
s(c,b,"\u2037","\\backtrprime");s(c,b,"\u25B2","\\blacktriangle");s(c,b,"\u25BC","\\blacktriangledown");s(c,b,"\u25A0","\\blacksquare");s(c,b,"\u29EB","\\blacklo\
zenge");s(c,b,"\u2605","\\bigstar");s(c,b,"\u2222","\\sphericalangle",!0);s(c,b,"\u2201","\\complement",!0);s(c,b,"\u2571","\\diagup");s(c,b,"\u2572","\\diagdown");
s(c,b,"\u25A1","\\square");s(c,b,"\u25A1","\\Box");s(c,b,"\u25CA","\\Diamond");s(c,b,"\xA5","\\yen",!0);s(N,b,"\xA5","\\yen",!0);s(c,b,"\u2713","\\checkmark",!0);
s(N,b,"\u2713","\\checkmark");s(c,b,"\u2717","\\ballotx",!0);s(N,b,"\u2717","\\ballotx");s(N,b,"\u2022","\\textbullet");s(c,b,"\u2136","\\beth",!0);s(c,b,"\u2138",
"\\daleth",!0);s(c,b,"\u2137","\\gimel",!0);s(c,b,"\u03DD","\\digamma",!0);s(c,b,"\u03F0","\\varkappa");s(c,Se,"\u231C","\\ulcorner",!0);s(c,ke,"\u231D","\\urcor\
ner",!0);s(c,Se,"\u231E","\\llcorner",!0);s(c,ke,"\u231F","\\lrcorner",!0);s(c,x,"\u2266","\\leqq",!0);s(c,x,"\u2A7D","\\leqslant",!0);s(c,x,"\u2A95","\\eqslantl\
ess",!0);s(c,x,"\u2272","\\lesssim",!0);s(c,x,"\u2A85","\\lessapprox",!0);s(c,x,"\u224A","\\approxeq",!0);s(c,I,"\u22D6","\\lessdot");s(c,x,"\u22D8","\\lll",!0);
s(c,x,"\u2276","\\lessgtr",!0);s(c,x,"\u22DA","\\lesseqgtr",!0);s(c,x,"\u2A8B","\\lesseqqgtr",!0);s(c,x,"\u2251","\\doteqdot");s(c,x,"\u2253","\\risingdotseq",!0);
s(c,x,"\u2252","\\fallingdotseq",!0);s(c,x,"\u223D","\\backsim",!0);s(c,x,"\u22CD","\\backsimeq",!0);s(c,x,"\u2AC5","\\subseteqq",!0);s(c,x,"\u22D0","\\Subset",
!0);s(c,x,"\u228F","\\sqsubset",!0);s(c,x,"\u227C","\\preccurlyeq",!0);s(c,x,"\u22DE","\\curlyeqprec",!0);s(c,x,"\u227E","\\precsim",!0);s(c,x,"\u2AB7","\\precap\
prox",!0);s(c,x,"\u22B2","\\vartriangleleft");s(c,x,"\u22B4","\\trianglelefteq");s(c,x,"\u22A8","\\vDash",!0);s(c,x,"\u22AB","\\VDash",!0);s(c,x,"\u22AA","\\Vvda\
sh",!0);s(c,x,"\u2323","\\smallsmile");s(c,x,"\u2322","\\smallfrown");s(c,x,"\u224F","\\bumpeq",!0);s(c,x,"\u224E","\\Bumpeq",!0);s(c,x,"\u2267","\\geqq",!0);s(
c,x,"\u2A7E","\\geqslant",!0);s(c,x,"\u2A96","\\eqslantgtr",!0);s(c,x,"\u2273","\\gtrsim",!0);s(c,x,"\u2A86","\\gtrapprox",!0);s(c,I,"\u22D7","\\gtrdot");s(c,x,
"\u22D9","\\ggg",!0);s(c,x,"\u2277","\\gtrless",!0);s(c,x,"\u22DB","\\gtreqless",!0);s(c,x,"\u2A8C","\\gtreqqless",!0);s(c,x,"\u2256","\\eqcirc",!0);s(c,x,"\u2257",
"\\circeq",!0);s(c,x,"\u225C","\\triangleq",!0);s(c,x,"\u223C","\\thicksim");s(c,x,"\u2248","\\thickapprox");s(c,x,"\u2AC6","\\supseteqq",!0);s(c,x,"\u22D1","\\S\
upset",!0);s(c,x,"\u2290","\\sqsupset",!0);s(c,x,"\u227D","\\succcurlyeq",!0);s(c,x,"\u22DF","\\curlyeqsucc",!0);s(c,x,"\u227F","\\succsim",!0);s(c,x,"\u2AB8","\
\\succapprox",!0);s(c,x,"\u22B3","\\vartriangleright");s(c,x,"\u22B5","\\trianglerighteq");s(c,x,"\u22A9","\\Vdash",!0);s(c,x,"\u2223","\\shortmid");s(c,x,"\u2225",
"\\shortparallel");s(c,x,"\u226C","\\between",!0);s(c,x,"\u22D4","\\pitchfork",!0);s(c,x,"\u221D","\\varpropto");s(c,x,"\u25C0","\\blacktriangleleft");s(c,x,"\u2234",
"\\therefore",!0);s(c,x,"\u220D","\\backepsilon");s(c,x,"\u25B6","\\blacktriangleright");s(c,x,"\u2235","\\because",!0);s(c,x,"\u22D8","\\llless");s(c,x,"\u22D9",
"\\gggtr");s(c,I,"\u22B2","\\lhd");s(c,I,"\u22B3","\\rhd");s(c,x,"\u2242","\\eqsim",!0);s(c,x,"\u2251","\\Doteq",!0);s(c,x,"\u297D","\\strictif",!0);s(c,x,"\u297C",
"\\strictfi",!0);s(c,I,"\u2214","\\dotplus",!0);s(c,I,"\u2216","\\smallsetminus");s(c,I,"\u22D2","\\Cap",!0);s(c,I,"\u22D3","\\Cup",!0);s(c,I,"\u2A5E","\\doubleb\
arwedge",!0);s(c,I,"\u229F","\\boxminus",!0);s(c,I,"\u229E","\\boxplus",!0);s(c,I,"\u29C4","\\boxslash",!0);s(c,I,"\u22C7","\\divideontimes",!0);s(c,I,"\u22C9",
"\\ltimes",!0);s(c,I,"\u22CA","\\rtimes",!0);s(c,I,"\u22CB","\\leftthreetimes",!0);s(c,I,"\u22CC","\\rightthreetimes",!0);s(c,I,"\u22CF","\\curlywedge",!0);s(c,
I,"\u22CE","\\curlyvee",!0);s(c,I,"\u229D","\\circleddash",!0);s(c,I,"\u229B","\\circledast",!0);s(c,I,"\u22BA","\\intercal",!0);s(c,I,"\u22D2","\\doublecap");s(
c,I,"\u22D3","\\doublecup");s(c,I,"\u22A0","\\boxtimes",!0);s(c,I,"\u22C8","\\bowtie",!0);s(c,I,"\u22C8","\\Join");s(c,I,"\u27D5","\\leftouterjoin",!0);s(c,I,"\u27D6",
"\\rightouterjoin",!0);s(c,I,"\u27D7","\\fullouterjoin",!0);s(c,I,"\u2238","\\dotminus",!0);s(c,I,"\u27D1","\\wedgedot",!0);s(c,I,"\u27C7","\\veedot",!0);s(c,I,
"\u2A62","\\doublebarvee",!0);s(c,I,"\u2A63","\\veedoublebar",!0);s(c,I,"\u2A5F","\\wedgebar",!0);s(c,I,"\u2A60","\\wedgedoublebar",!0);s(c,I,"\u2A54","\\Vee",!0);
s(c,I,"\u2A53","\\Wedge",!0);s(c,I,"\u2A43","\\barcap",!0);s(c,I,"\u2A42","\\barcup",!0);s(c,I,"\u2A48","\\capbarcup",!0);s(c,I,"\u2A40","\\capdot",!0);s(c,I,"\u2A47",
"\\capovercup",!0);s(c,I,"\u2A46","\\cupovercap",!0);s(c,I,"\u2A4D","\\closedvarcap",!0);s(c,I,"\u2A4C","\\closedvarcup",!0);s(c,I,"\u2A2A","\\minusdot",!0);s(c,
I,"\u2A2B","\\minusfdots",!0);s(c,I,"\u2A2C","\\minusrdots",!0);s(c,I,"\u22BB","\\Xor",!0);s(c,I,"\u22BC","\\Nand",!0);s(c,I,"\u22BD","\\Nor",!0);s(c,I,"\u22BD",
"\\barvee");s(c,I,"\u2AF4","\\interleave",!0);s(c,I,"\u29E2","\\shuffle",!0);s(c,I,"\u2AF6","\\threedotcolon",!0);s(c,I,"\u2982","\\typecolon",!0);s(c,I,"\u223E",
"\\invlazys",!0);s(c,I,"\u2A4B","\\twocaps",!0);s(c,I,"\u2A4A","\\twocups",!0);s(c,I,"\u2A4E","\\Sqcap",!0);s(c,I,"\u2A4F","\\Sqcup",!0);s(c,I,"\u2A56","\\veeonv\
ee",!0);s(c,I,"\u2A55","\\wedgeonwedge",!0);s(c,I,"\u29D7","\\blackhourglass",!0);s(c,I,"\u29C6","\\boxast",!0);s(c,I,"\u29C8","\\boxbox",!0);s(c,I,"\u29C7","\\b\
oxcircle",!0);s(c,I,"\u229C","\\circledequal",!0);s(c,I,"\u29B7","\\circledparallel",!0);s(c,I,"\u29B6","\\circledvert",!0);s(c,I,"\u29B5","\\circlehbar",!0);s(
c,I,"\u27E1","\\concavediamond",!0);s(c,I,"\u27E2","\\concavediamondtickleft",!0);s(c,I,"\u27E3","\\concavediamondtickright",!0);s(c,I,"\u22C4","\\diamond",!0);
s(c,I,"\u29D6","\\hourglass",!0);s(c,I,"\u27E0","\\lozengeminus",!0);s(c,I,"\u233D","\\obar",!0);s(c,I,"\u29B8","\\obslash",!0);s(c,I,"\u2A38","\\odiv",!0);s(c,
I,"\u29C1","\\ogreaterthan",!0);s(c,I,"\u29C0","\\olessthan",!0);s(c,I,"\u29B9","\\operp",!0);s(c,I,"\u2A37","\\Otimes",!0);s(c,I,"\u2A36","\\otimeshat",!0);s(c,
I,"\u22C6","\\star",!0);s(c,I,"\u25B3","\\triangle",!0);s(c,I,"\u2A3A","\\triangleminus",!0);s(c,I,"\u2A39","\\triangleplus",!0);s(c,I,"\u2A3B","\\triangletimes",
!0);s(c,I,"\u27E4","\\whitesquaretickleft",!0);s(c,I,"\u27E5","\\whitesquaretickright",!0);s(c,I,"\u2A33","\\smashtimes",!0);s(c,x,"\u21E2","\\dashrightarrow",!0);
s(c,x,"\u21E0","\\dashleftarrow",!0);s(c,x,"\u21C7","\\leftleftarrows",!0);s(c,x,"\u21C6","\\leftrightarrows",!0);s(c,x,"\u21DA","\\Lleftarrow",!0);s(c,x,"\u219E",
"\\twoheadleftarrow",!0);s(c,x,"\u21A2","\\leftarrowtail",!0);s(c,x,"\u21AB","\\looparrowleft",!0);s(c,x,"\u21CB","\\leftrightharpoons",!0);s(c,x,"\u21B6","\\cur\
vearrowleft",!0);s(c,x,"\u21BA","\\circlearrowleft",!0);s(c,x,"\u21B0","\\Lsh",!0);s(c,x,"\u21C8","\\upuparrows",!0);s(c,x,"\u21BF","\\upharpoonleft",!0);s(c,x,
"\u21C3","\\downharpoonleft",!0);s(c,x,"\u22B6","\\origof",!0);s(c,x,"\u22B7","\\imageof",!0);s(c,x,"\u22B8","\\multimap",!0);s(c,x,"\u21AD","\\leftrightsquigarr\
ow",!0);s(c,x,"\u21C9","\\rightrightarrows",!0);s(c,x,"\u21C4","\\rightleftarrows",!0);s(c,x,"\u21A0","\\twoheadrightarrow",!0);s(c,x,"\u21A3","\\rightarrowtail",
!0);s(c,x,"\u21AC","\\looparrowright",!0);s(c,x,"\u21B7","\\curvearrowright",!0);s(c,x,"\u21BB","\\circlearrowright",!0);s(c,x,"\u21B1","\\Rsh",!0);s(c,x,"\u21CA",
"\\downdownarrows",!0);s(c,x,"\u21BE","\\upharpoonright",!0);s(c,x,"\u21C2","\\downharpoonright",!0);s(c,x,"\u21DD","\\rightsquigarrow",!0);s(c,x,"\u21DD","\\lea\
dsto");s(c,x,"\u21DB","\\Rrightarrow",!0);s(c,x,"\u21BE","\\restriction");s(c,b,"\u2018","`");s(c,b,"$","\\$");s(N,b,"$","\\$");s(N,b,"$","\\textdollar");s(c,b,
"\xA2","\\cent");s(N,b,"\xA2","\\cent");s(c,b,"%","\\%");s(N,b,"%","\\%");s(c,b,"_","\\_");s(N,b,"_","\\_");s(N,b,"_","\\textunderscore");s(N,b,"\u2423","\\textv\
isiblespace",!0);s(c,b,"\u2220","\\angle",!0);s(c,b,"\u221E","\\infty",!0);s(c,b,"\u2032","\\prime");s(c,b,"\u2033","\\dprime");s(c,b,"\u2034","\\trprime");s(c,
b,"\u2057","\\qprime");s(c,b,"\u25B3","\\triangle");s(N,b,"\u0391","\\Alpha",!0);s(N,b,"\u0392","\\Beta",!0);s(N,b,"\u0393","\\Gamma",!0);s(N,b,"\u0394","\\Delta",
!0);s(N,b,"\u0395","\\Epsilon",!0);s(N,b,"\u0396","\\Zeta",!0);s(N,b,"\u0397","\\Eta",!0);s(N,b,"\u0398","\\Theta",!0);s(N,b,"\u0399","\\Iota",!0);s(N,b,"\u039A",
"\\Kappa",!0);s(N,b,"\u039B","\\Lambda",!0);s(N,b,"\u039C","\\Mu",!0);s(N,b,"\u039D","\\Nu",!0);s(N,b,"\u039E","\\Xi",!0);s(N,b,"\u039F","\\Omicron",!0);s(N,b,"\
\u03A0","\\Pi",!0);s(N,b,"\u03A1","\\Rho",!0);s(N,b,"\u03A3","\\Sigma",!0);s(N,b,"\u03A4","\\Tau",!0);s(N,b,"\u03A5","\\Upsilon",!0);s(N,b,"\u03A6","\\Phi",!0);
s(N,b,"\u03A7","\\Chi",!0);s(N,b,"\u03A8","\\Psi",!0);s(N,b,"\u03A9","\\Omega",!0);s(c,F,"\u0391","\\Alpha",!0);s(c,F,"\u0392","\\Beta",!0);s(c,F,"\u0393","\\Gam\
ma",!0);s(c,F,"\u0394","\\Delta",!0);s(c,F,"\u0395","\\Epsilon",!0);s(c,F,"\u0396","\\Zeta",!0);s(c,F,"\u0397","\\Eta",!0);s(c,F,"\u0398","\\Theta",!0);s(c,F,"\u0399",
"\\Iota",!0);s(c,F,"\u039A","\\Kappa",!0);s(c,F,"\u039B","\\Lambda",!0);s(c,F,"\u039C","\\Mu",!0);s(c,F,"\u039D","\\Nu",!0);s(c,F,"\u039E","\\Xi",!0);s(c,F,"\u039F",
"\\Omicron",!0);s(c,F,"\u03A0","\\Pi",!0);s(c,F,"\u03A1","\\Rho",!0);s(c,F,"\u03A3","\\Sigma",!0);s(c,F,"\u03A4","\\Tau",!0);s(c,F,"\u03A5","\\Upsilon",!0);s(c,
F,"\u03A6","\\Phi",!0);s(c,F,"\u03A7","\\Chi",!0);s(c,F,"\u03A8","\\Psi",!0);s(c,F,"\u03A9","\\Omega",!0);s(c,Se,"\xAC","\\neg",!0);s(c,Se,"\xAC","\\lnot");s(c,
b,"\u22A4","\\top");s(c,b,"\u22A5","\\bot");s(c,b,"\u2205","\\emptyset");s(c,b,"\u2300","\\varnothing");s(c,F,"\u03B1","\\alpha",!0);s(c,F,"\u03B2","\\beta",!0);
s(c,F,"\u03B3","\\gamma",!0);s(c,F,"\u03B4","\\delta",!0);s(c,F,"\u03F5","\\epsilon",!0);s(c,F,"\u03B6","\\zeta",!0);s(c,F,"\u03B7","\\eta",!0);s(c,F,"\u03B8","\
\\theta",!0);s(c,F,"\u03B9","\\iota",!0);s(c,F,"\u03BA","\\kappa",!0);s(c,F,"\u03BB","\\lambda",!0);s(c,F,"\u03BC","\\mu",!0);s(c,F,"\u03BD","\\nu",!0);s(c,F,"\u03BE",
"\\xi",!0);s(c,F,"\u03BF","\\omicron",!0);s(c,F,"\u03C0","\\pi",!0);s(c,F,"\u03C1","\\rho",!0);s(c,F,"\u03C3","\\sigma",!0);s(c,F,"\u03C4","\\tau",!0);s(c,F,"\u03C5",
"\\upsilon",!0);s(c,F,"\u03D5","\\phi",!0);s(c,F,"\u03C7","\\chi",!0);s(c,F,"\u03C8","\\psi",!0);s(c,F,"\u03C9","\\omega",!0);s(c,F,"\u03B5","\\varepsilon",!0);
s(c,F,"\u03D1","\\vartheta",!0);s(c,F,"\u03D6","\\varpi",!0);s(c,F,"\u03F1","\\varrho",!0);s(c,F,"\u03C2","\\varsigma",!0);s(c,F,"\u03C6","\\varphi",!0);s(c,F,"\
\u03D8","\\Coppa",!0);s(c,F,"\u03D9","\\coppa",!0);s(c,F,"\u03D9","\\varcoppa",!0);s(c,F,"\u03DE","\\Koppa",!0);s(c,F,"\u03DF","\\koppa",!0);s(c,F,"\u03E0","\\Sa\
mpi",!0);s(c,F,"\u03E1","\\sampi",!0);s(c,F,"\u03DA","\\Stigma",!0);s(c,F,"\u03DB","\\stigma",!0);s(c,F,"\u2AEB","\\Bot");s(c,b,"\xF0","\\eth",!0);s(N,b,"\xF0",
"\xF0");s(c,b,"\xC5","\\AA");s(N,b,"\xC5","\\AA",!0);s(c,b,"\xC6","\\AE",!0);s(N,b,"\xC6","\\AE",!0);s(c,b,"\xD0","\\DH",!0);s(N,b,"\xD0","\\DH",!0);s(c,b,"\xDE",
"\\TH",!0);s(N,b,"\xDE","\\TH",!0);s(c,b,"\xDF","\\ss",!0);s(N,b,"\xDF","\\ss",!0);s(c,b,"\xE5","\\aa");s(N,b,"\xE5","\\aa",!0);s(c,b,"\xE6","\\ae",!0);s(N,b,"\xE6",
"\\ae",!0);s(c,b,"\xF0","\\dh");s(N,b,"\xF0","\\dh",!0);s(c,b,"\xFE","\\th",!0);s(N,b,"\xFE","\\th",!0);s(c,b,"\u0110","\\DJ",!0);s(N,b,"\u0110","\\DJ",!0);s(c,
b,"\u0111","\\dj",!0);s(N,b,"\u0111","\\dj",!0);s(c,b,"\u0141","\\L",!0);s(N,b,"\u0141","\\L",!0);s(c,b,"\u0141","\\l",!0);s(N,b,"\u0141","\\l",!0);s(c,b,"\u014A",
"\\NG",!0);s(N,b,"\u014A","\\NG",!0);s(c,b,"\u014B","\\ng",!0);s(N,b,"\u014B","\\ng",!0);s(c,b,"\u0152","\\OE",!0);s(N,b,"\u0152","\\OE",!0);s(c,b,"\u0153","\\oe",
!0);s(N,b,"\u0153","\\oe",!0);s(c,I,"\u2217","\u2217",!0);s(c,I,"+","+");s(c,I,"\u2217","*");s(c,I,"\u2044","/",!0);s(c,I,"\u2044","\u2044");s(c,I,"\u2212","-",
!0);s(c,I,"\u22C5","\\cdot",!0);s(c,I,"\u2218","\\circ",!0);s(c,I,"\xF7","\\div",!0);s(c,I,"\xB1","\\pm",!0);s(c,I,"\xD7","\\times",!0);s(c,I,"\u2229","\\cap",!0);
s(c,I,"\u222A","\\cup",!0);s(c,I,"\u2216","\\setminus",!0);s(c,I,"\u2227","\\land");s(c,I,"\u2228","\\lor");s(c,I,"\u2227","\\wedge",!0);s(c,I,"\u2228","\\vee",
!0);s(c,Se,"\u27E6","\\llbracket",!0);s(c,ke,"\u27E7","\\rrbracket",!0);s(c,Se,"\u27E8","\\langle",!0);s(c,Se,"\u27EA","\\lAngle",!0);s(c,Se,"\u2989","\\llangle",
!0);s(c,Se,"|","\\lvert");s(c,Se,"\u2016","\\lVert",!0);s(c,b,"!","\\oc");s(c,b,"?","\\wn");s(c,b,"\u2193","\\shpos");s(c,b,"\u2195","\\shift");s(c,b,"\u2191","\
\\shneg");s(c,ke,"?","?");s(c,ke,"!","!");s(c,ke,"\u203C","\u203C");s(c,ke,"\u27E9","\\rangle",!0);s(c,ke,"\u27EB","\\rAngle",!0);s(c,ke,"\u298A","\\rrangle",!0);
s(c,ke,"|","\\rvert");s(c,ke,"\u2016","\\rVert");s(c,Se,"\u2983","\\lBrace",!0);s(c,ke,"\u2984","\\rBrace",!0);s(c,x,"=","\\equal",!0);s(c,x,":",":");s(c,x,"\u2248",
"\\approx",!0);s(c,x,"\u2245","\\cong",!0);s(c,x,"\u2265","\\ge");s(c,x,"\u2265","\\geq",!0);s(c,x,"\u2190","\\gets");s(c,x,">","\\gt",!0);s(c,x,"\u2208","\\in",
!0);s(c,x,"\u2209","\\notin",!0);s(c,x,"\uE020","\\@not");s(c,x,"\u2282","\\subset",!0);s(c,x,"\u2283","\\supset",!0);s(c,x,"\u2286","\\subseteq",!0);s(c,x,"\u2287",
"\\supseteq",!0);s(c,x,"\u2288","\\nsubseteq",!0);s(c,x,"\u2288","\\nsubseteqq");s(c,x,"\u2289","\\nsupseteq",!0);s(c,x,"\u2289","\\nsupseteqq");s(c,x,"\u22A8",
"\\models");s(c,x,"\u2190","\\leftarrow",!0);s(c,x,"\u2264","\\le");s(c,x,"\u2264","\\leq",!0);s(c,x,"<","\\lt",!0);s(c,x,"\u2192","\\rightarrow",!0);s(c,x,"\u2192",
"\\to");s(c,x,"\u2271","\\ngeq",!0);s(c,x,"\u2271","\\ngeqq");s(c,x,"\u2271","\\ngeqslant");s(c,x,"\u2270","\\nleq",!0);s(c,x,"\u2270","\\nleqq");s(c,x,"\u2270",
"\\nleqslant");s(c,x,"\u2AEB","\\Perp",!0);s(c,mt,"\xA0","\\ ");s(c,mt,"\xA0","\\space");s(c,mt,"\xA0","\\nobreakspace");s(N,mt,"\xA0","\\ ");s(N,mt,"\xA0"," ");
s(N,mt,"\xA0","\\space");s(N,mt,"\xA0","\\nobreakspace");s(c,mt,null,"\\nobreak");s(c,mt,null,"\\allowbreak");s(c,bn,",",",");s(N,bn,":",":");s(c,bn,";",";");s(
c,I,"\u22BC","\\barwedge");s(c,I,"\u22BB","\\veebar");s(c,I,"\u2299","\\odot",!0);s(c,I,"\u2295\uFE0E","\\oplus");s(c,I,"\u2297","\\otimes",!0);s(c,b,"\u2202","\
\\partial",!0);s(c,I,"\u2298","\\oslash",!0);s(c,I,"\u229A","\\circledcirc",!0);s(c,I,"\u22A1","\\boxdot",!0);s(c,I,"\u25B3","\\bigtriangleup");s(c,I,"\u25BD","\
\\bigtriangledown");s(c,I,"\u2020","\\dagger");s(c,I,"\u22C4","\\diamond");s(c,I,"\u25C3","\\triangleleft");s(c,I,"\u25B9","\\triangleright");s(c,Se,"{","\\{");
s(N,b,"{","\\{");s(N,b,"{","\\textbraceleft");s(c,ke,"}","\\}");s(N,b,"}","\\}");s(N,b,"}","\\textbraceright");s(c,Se,"{","\\lbrace");s(c,ke,"}","\\rbrace");s(c,
Se,"[","\\lbrack",!0);s(N,b,"[","\\lbrack",!0);s(c,ke,"]","\\rbrack",!0);s(N,b,"]","\\rbrack",!0);s(c,Se,"(","\\lparen",!0);s(c,ke,")","\\rparen",!0);s(c,Se,"\u2987",
"\\llparenthesis",!0);s(c,ke,"\u2988","\\rrparenthesis",!0);s(N,b,"<","\\textless",!0);s(N,b,">","\\textgreater",!0);s(c,Se,"\u230A","\\lfloor",!0);s(c,ke,"\u230B",
"\\rfloor",!0);s(c,Se,"\u2308","\\lceil",!0);s(c,ke,"\u2309","\\rceil",!0);s(c,b,"\\","\\backslash");s(c,b,"|","|");s(c,b,"|","\\vert");s(N,b,"|","\\textbar",!0);
s(c,b,"\u2016","\\|");s(c,b,"\u2016","\\Vert");s(N,b,"\u2016","\\textbardbl");s(N,b,"~","\\textasciitilde");s(N,b,"\\","\\textbackslash");s(N,b,"^","\\textasciic\
ircum");s(c,x,"\u2191","\\uparrow",!0);s(c,x,"\u21D1","\\Uparrow",!0);s(c,x,"\u2193","\\downarrow",!0);s(c,x,"\u21D3","\\Downarrow",!0);s(c,x,"\u2195","\\updowna\
rrow",!0);s(c,x,"\u21D5","\\Updownarrow",!0);s(c,se,"\u2210","\\coprod");s(c,se,"\u22C1","\\bigvee");s(c,se,"\u22C0","\\bigwedge");s(c,se,"\u2A04","\\biguplus");
s(c,se,"\u2A04","\\bigcupplus");s(c,se,"\u2A03","\\bigcupdot");s(c,se,"\u2A07","\\bigdoublevee");s(c,se,"\u2A08","\\bigdoublewedge");s(c,se,"\u22C2","\\bigcap");
s(c,se,"\u22C3","\\bigcup");s(c,se,"\u222B","\\int");s(c,se,"\u222B","\\intop");s(c,se,"\u222C","\\iint");s(c,se,"\u222D","\\iiint");s(c,se,"\u220F","\\prod");s(
c,se,"\u2211","\\sum");s(c,se,"\u2A02","\\bigotimes");s(c,se,"\u2A01","\\bigoplus");s(c,se,"\u2A00","\\bigodot");s(c,se,"\u2A09","\\bigtimes");s(c,se,"\u222E","\
\\oint");s(c,se,"\u222F","\\oiint");s(c,se,"\u2230","\\oiiint");s(c,se,"\u2231","\\intclockwise");s(c,se,"\u2232","\\varointclockwise");s(c,se,"\u2A0C","\\iiiint");
s(c,se,"\u2A0D","\\intbar");s(c,se,"\u2A0E","\\intBar");s(c,se,"\u2A0F","\\fint");s(c,se,"\u2A12","\\rppolint");s(c,se,"\u2A13","\\scpolint");s(c,se,"\u2A15","\\\
pointint");s(c,se,"\u2A16","\\sqint");s(c,se,"\u2A17","\\intlarhk");s(c,se,"\u2A18","\\intx");s(c,se,"\u2A19","\\intcap");s(c,se,"\u2A1A","\\intcup");s(c,se,"\u2A05",
"\\bigsqcap");s(c,se,"\u2A06","\\bigsqcup");s(c,se,"\u222B","\\smallint");s(N,It,"\u2026","\\textellipsis");s(c,It,"\u2026","\\mathellipsis");s(N,It,"\u2026","\\\
ldots",!0);s(c,It,"\u2026","\\ldots",!0);s(c,It,"\u22F0","\\iddots",!0);s(c,It,"\u22EF","\\@cdots",!0);s(c,It,"\u22F1","\\ddots",!0);s(c,b,"\u22EE","\\varvdots");
s(N,b,"\u22EE","\\varvdots");s(c,ue,"\xB4","\\acute");s(c,ue,"`","\\grave");s(c,ue,"\xA8","\\ddot");s(c,ue,"\u2026","\\dddot");s(c,ue,"\u2026.","\\ddddot");s(c,
ue,"~","\\tilde");s(c,ue,"\u203E","\\bar");s(c,ue,"\u02D8","\\breve");s(c,ue,"\u02C7","\\check");s(c,ue,"\u02C6","\\hat");s(c,ue,"\u2192","\\vec");s(c,ue,"\u02D9",
"\\dot");s(c,ue,"\u02DA","\\mathring");s(c,F,"\u0131","\\imath",!0);s(c,F,"\u0237","\\jmath",!0);s(c,b,"\u0131","\u0131");s(c,b,"\u0237","\u0237");s(N,b,"\u0131",
"\\i",!0);s(N,b,"\u0237","\\j",!0);s(N,b,"\xF8","\\o",!0);s(c,F,"\xF8","\\o",!0);s(N,b,"\xD8","\\O",!0);s(c,F,"\xD8","\\O",!0);s(N,ue,"\u02CA","\\'");s(N,ue,"\u02CB",
"\\`");s(N,ue,"\u02C6","\\^");s(N,ue,"~","\\~");s(N,ue,"\u02C9","\\=");s(N,ue,"\u02D8","\\u");s(N,ue,"\u02D9","\\.");s(N,ue,"\xB8","\\c");s(N,ue,"\u02DA","\\r");
s(N,ue,"\u02C7","\\v");s(N,ue,"\xA8",'\\"');s(N,ue,"\u02DD","\\H");s(c,ue,"\u02CA","\\'");s(c,ue,"\u02CB","\\`");s(c,ue,"\u02C6","\\^");s(c,ue,"~","\\~");s(c,ue,
"\u02C9","\\=");s(c,ue,"\u02D8","\\u");s(c,ue,"\u02D9","\\.");s(c,ue,"\xB8","\\c");s(c,ue,"\u02DA","\\r");s(c,ue,"\u02C7","\\v");s(c,ue,"\xA8",'\\"');s(c,ue,"\u02DD",
"\\H");var bm={"--":!0,"---":!0,"``":!0,"''":!0};s(N,b,"\u2013","--",!0);s(N,b,"\u2013","\\textendash");s(N,b,"\u2014","---",!0);s(N,b,"\u2014","\\textemdash");
s(N,b,"\u2018","`",!0);s(N,b,"\u2018","\\textquoteleft");s(N,b,"\u2019","'",!0);s(N,b,"\u2019","\\textquoteright");s(N,b,"\u201C","``",!0);s(N,b,"\u201C","\\text\
quotedblleft");s(N,b,"\u201D","''",!0);s(N,b,"\u201D","\\textquotedblright");s(c,b,"\xB0","\\degree",!0);s(N,b,"\xB0","\\degree");s(N,b,"\xB0","\\textdegree",!0);
s(c,b,"\xA3","\\pounds");s(c,b,"\xA3","\\mathsterling",!0);s(N,b,"\xA3","\\pounds");s(N,b,"\xA3","\\textsterling",!0);s(c,b,"\u2720","\\maltese");s(N,b,"\u2720",
"\\maltese");s(c,b,"\u20AC","\\euro",!0);s(N,b,"\u20AC","\\euro",!0);s(N,b,"\u20AC","\\texteuro");s(c,b,"\xA9","\\copyright",!0);s(N,b,"\xA9","\\textcopyright");
s(c,b,"\u2300","\\diameter",!0);s(N,b,"\u2300","\\diameter");s(c,b,"\u{1D6E4}","\\varGamma");s(c,b,"\u{1D6E5}","\\varDelta");s(c,b,"\u{1D6E9}","\\varTheta");s(c,
b,"\u{1D6EC}","\\varLambda");s(c,b,"\u{1D6EF}","\\varXi");s(c,b,"\u{1D6F1}","\\varPi");s(c,b,"\u{1D6F4}","\\varSigma");s(c,b,"\u{1D6F6}","\\varUpsilon");s(c,b,"\
\u{1D6F7}","\\varPhi");s(c,b,"\u{1D6F9}","\\varPsi");s(c,b,"\u{1D6FA}","\\varOmega");s(N,b,"\u{1D6E4}","\\varGamma");s(N,b,"\u{1D6E5}","\\varDelta");s(N,b,"\u{1D6E9}",
"\\varTheta");s(N,b,"\u{1D6EC}","\\varLambda");s(N,b,"\u{1D6EF}","\\varXi");s(N,b,"\u{1D6F1}","\\varPi");s(N,b,"\u{1D6F4}","\\varSigma");s(N,b,"\u{1D6F6}","\\var\
Upsilon");s(N,b,"\u{1D6F7}","\\varPhi");s(N,b,"\u{1D6F9}","\\varPsi");s(N,b,"\u{1D6FA}","\\varOmega");var ds='0123456789/@."';for(let e=0;e<ds.length;e++){let t=ds.
charAt(e);s(c,b,t,t)}var ps='0123456789!@*()-=+";:?/.,';for(let e=0;e<ps.length;e++){let t=ps.charAt(e);s(N,b,t,t)}var rr="ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijk\
lmnopqrstuvwxyz";for(let e=0;e<rr.length;e++){let t=rr.charAt(e);s(c,F,t,t),s(N,b,t,t)}var ms="\xC7\xD0\xDE\xE7\xFE\u2102\u210D\u2115\u2119\u211A\u211D\u2124\u210E\u210F\u210A\u210B\u210C\u2110\u2111\u2112\u2113\u2118\u211B\u211C\u212C\u2130\u2131\u2133\u212D\u2128";
for(let e=0;e<ms.length;e++){let t=ms.charAt(e);s(c,F,t,t),s(N,b,t,t)}var V="";for(let e=0;e<rr.length;e++){V=String.fromCharCode(55349,56320+e),s(c,F,V,V),s(N,
b,V,V),V=String.fromCharCode(55349,56372+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56424+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56580+e),
s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56736+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56788+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(
55349,56840+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56944+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,56632+e),s(c,F,V,V),s(N,b,V,V);let t=rr.
charAt(e);V=String.fromCharCode(55349,56476+e),s(c,F,t,V),s(N,b,t,V)}for(let e=0;e<10;e++)V=String.fromCharCode(55349,57294+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(
55349,57314+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,57324+e),s(c,F,V,V),s(N,b,V,V),V=String.fromCharCode(55349,57334+e),s(c,F,V,V),s(N,b,V,V);function xm(e,t,n){
let r=[],i=[],o=[],a=0,l=0;for(;l<e.length;){for(;e[l]instanceof mn;)e.splice(l,1,...e[l].children);let u=e[l];if(u.attributes&&u.attributes.linebreak&&u.attributes.
linebreak==="newline"){o.length>0&&i.push(new S("mrow",o)),i.push(u),o=[];let d=new S("mtd",i);d.style.textAlign="left",r.push(new S("mtr",[d])),i=[],l+=1;continue}
if(o.push(u),u.type&&u.type==="mo"&&u.children.length===1&&!(u.attributes.form&&u.attributes.form==="prefix")&&!Object.prototype.hasOwnProperty.call(u.attributes,
"movablelimits")){let d=u.children[0].text;if(t==="="&&d==="="){if(a+=1,a>1){o.pop();let p=new S("mrow",o);i.push(p),o=[u]}}else if(t==="tex"){let p=l<e.length-
1?e[l+1]:null,m=!0;if(!(p&&p.type==="mtext"&&p.attributes.linebreak&&p.attributes.linebreak==="nobreak"))for(let h=l+1;h<e.length;h++){let f=e[h];if(f.type&&f.type===
"mspace"&&!(f.attributes.linebreak&&f.attributes.linebreak==="newline"))o.push(f),l+=1,f.attributes&&f.attributes.linebreak&&f.attributes.linebreak==="nobreak"&&
(m=!1);else break}if(m){let h=new S("mrow",o);i.push(h),o=[]}}}l+=1}if(o.length>0){let u=new S("mrow",o);i.push(u)}if(r.length>0){let u=new S("mtd",i);u.style.textAlign=
"left";let d=new S("mtr",[u]);r.push(d);let p=new S("mtable",r);return n||(p.setAttribute("columnalign","left"),p.setAttribute("rowspacing","0em")),p}return Ct(
i)}var He=function(e,t,n){return Ee[t][e]&&Ee[t][e].replace&&e.charCodeAt(0)!==55349&&!(Object.prototype.hasOwnProperty.call(bm,e)&&n&&(n.fontFamily&&n.fontFamily.
slice(4,6)==="tt"||n.font&&n.font.slice(4,6)==="tt"))&&(e=Ee[t][e].replace),new Ne(e)},hs=(e,t)=>{if(e.children.length===0||e.children[e.children.length-1].type!==
"mtext"){let n=new S("mtext",[new Ne(t.children[0].text)]);e.children.push(n)}else e.children[e.children.length-1].children[0].text+=t.children[0].text},lr=e=>{
if(e.type!=="mrow"&&e.type!=="mstyle"||e.children.length===0)return e;let t=new S("mrow");for(let n=0;n<e.children.length;n++){let r=e.children[n];if(r.type==="\
mtext"&&Object.keys(r.attributes).length===0)hs(t,r);else if(r.type==="mrow"){let i=!0;for(let o=0;o<r.children.length;o++)if(r.children[o].type!=="mtext"||Object.
keys(r.attributes).length!==0){i=!1;break}if(i)for(let o=0;o<r.children.length;o++){let a=r.children[o];hs(t,a)}else t.children.push(r)}else t.children.push(r)}
for(let n=0;n<t.children.length;n++)if(t.children[n].type==="mtext"){let r=t.children[n];r.children[0].text.charAt(0)===" "&&(r.children[0].text="\xA0"+r.children[0].
text.slice(1));let i=r.children[0].text.length;i>0&&r.children[0].text.charAt(i-1)===" "&&(r.children[0].text=r.children[0].text.slice(0,-1)+"\xA0");for(let[o,a]of Object.
entries(e.attributes))r.attributes[o]=a}return t.children.length===1&&t.children[0].type==="mtext"?t.children[0]:t},xn=function(e,t=!1){if(e.length===1&&!(e[0]instanceof
mn))return e[0];if(!t){e[0]instanceof S&&e[0].type==="mo"&&!e[0].attributes.fence&&(e[0].attributes.lspace="0em",e[0].attributes.rspace="0em");let n=e.length-1;
e[n]instanceof S&&e[n].type==="mo"&&!e[n].attributes.fence&&(e[n].attributes.lspace="0em",e[n].attributes.rspace="0em")}return new S("mrow",e)};function ci(e){if(!e)
return!1;if(e.type==="mi"&&e.children.length===1){let t=e.children[0];return t instanceof Ne&&t.text==="."}else if(e.type==="mtext"&&e.children.length===1){let t=e.
children[0];return t instanceof Ne&&t.text==="\u2008"}else if(e.type==="mo"&&e.children.length===1&&e.getAttribute("separator")==="true"&&e.getAttribute("lspace")===
"0em"&&e.getAttribute("rspace")==="0em"){let t=e.children[0];return t instanceof Ne&&t.text===","}else return!1}var ym=(e,t)=>{let n=e[t],r=e[t+1];return n.type===
"atom"&&n.text===","&&n.loc&&r.loc&&n.loc.end===r.loc.start},Zn=e=>e.type==="atom"&&e.family==="rel"||e.type==="mclass"&&e.mclass==="mrel",Be=function(e,t,n=!1){
if(!n&&e.length===1){let a=pe(e[0],t);return a instanceof S&&a.type==="mo"&&(a.setAttribute("lspace","0em"),a.setAttribute("rspace","0em")),[a]}let r=[],i=[],o;
for(let a=0;a<e.length;a++)i.push(pe(e[a],t));for(let a=0;a<i.length;a++){let l=i[a];if(a<e.length-1&&Zn(e[a])&&Zn(e[a+1])&&l.setAttribute("rspace","0em"),a>0&&
Zn(e[a])&&Zn(e[a-1])&&l.setAttribute("lspace","0em"),l.type==="mn"&&o&&o.type==="mn"){o.children.push(...l.children);continue}else if(ci(l)&&o&&o.type==="mn"){o.
children.push(...l.children);continue}else if(o&&o.type==="mn"&&a<i.length-1&&i[a+1].type==="mn"&&ym(e,a)){o.children.push(...l.children);continue}else if(l.type===
"mn"&&ci(o))l.children=[...o.children,...l.children],r.pop();else if((l.type==="msup"||l.type==="msub")&&l.children.length>=1&&o&&(o.type==="mn"||ci(o))){let u=l.
children[0];u instanceof S&&u.type==="mn"&&o&&(u.children=[...o.children,...u.children],r.pop())}r.push(l),o=l}return r},yt=function(e,t,n=!1){return xn(Be(e,t,
n),n)},pe=function(e,t){if(!e)return new S("mrow");if(er[e.type])return er[e.type](e,t);throw new B("Got group of unknown type: '"+e.type+"'")},fs=e=>new S("mtd",
[],[],{padding:"0",width:"50%"}),wm=["mrow","mtd","mtable","mtr"],gi=e=>{for(let t of e.children)if(t.type&&wm.includes(t.type)){if(t.classes&&t.classes[0]==="t\
ml-label")return t.label;{let n=gi(t);if(n)return n}}else if(!t.type){let n=gi(t);if(n)return n}},_m=(e,t,n,r)=>{t=yt(t[0].body,n),t=lr(t),t.classes.push("tml-t\
ag");let i=gi(e);e=new S("mtd",[e]);let o=[fs(),e,fs()];o[r?0:2].children.push(t);let a=new S("mtr",o,["tml-tageqn"]);i&&a.setAttribute("id",i);let l=new S("mta\
ble",[a]);return l.style.width="100%",l.setAttribute("displaystyle","true"),l};function Em(e,t,n,r){let i=null;e.length===1&&e[0].type==="tag"&&(i=e[0].tag,e=e[0].
body);let o=Be(e,n);if(o.length===1&&o[0]instanceof nr)return o[0];let a=r.displayMode||r.annotate?"none":r.wrap,l=o.length===0?null:o[0],u=o.length===1&&i===null&&
l instanceof S?o[0]:xm(o,a,r.displayMode);if(i&&(u=_m(u,i,n,r.leqno)),r.annotate){let p=new S("annotation",[new Ne(t)]);p.setAttribute("encoding","application/x\
-tex"),u=new S("semantics",[u,p])}let d=new S("math",[u]);return r.xml&&d.setAttribute("xmlns","http://www.w3.org/1998/Math/MathML"),r.displayMode&&(d.setAttribute(
"display","block"),d.style.display="block math",d.classes=["tml-display"]),d}var km="DHKLUcegorsuvxyz\u03A0\u03A5\u03A8\u03B1\u03B4\u03B7\u03B9\u03BC\u03BD\u03BF\u03C4\u03C5\u03C7\u03F5",
Sm="BCEGIMNOPQRSTXZlpqtw\u0393\u0398\u039E\u03A3\u03A6\u03A9\u03B2\u03B5\u03B6\u03B8\u03BE\u03C1\u03C2\u03C6\u03C8\u03D1\u03D5\u03F1",vm="AFJdf\u0394\u039B",Zs=(e,t)=>{
let n=e.isStretchy?Vs(e):new S("mo",[He(e.label,e.mode)]);e.isStretchy||n.setAttribute("stretchy","false"),e.label!=="\\vec"&&(n.style.mathDepth="0");let r=e.label===
"\\c"?"munder":"mover",i=Tm.has(e.label);if(r==="mover"&&e.mode==="math"&&!e.isStretchy&&e.base.text&&e.base.text.length===1){let a=e.base.text,l=e.label==="\\ve\
c",u=l==="\\vec"?"-vec":"";l&&n.classes.push("tml-vec");let d=l?"-vec":i?"-acc":"";km.indexOf(a)>-1?(n.classes.push(`chr-sml${u}`),n.classes.push(`wbk-sml${d}`)):
Sm.indexOf(a)>-1?(n.classes.push(`chr-med${u}`),n.classes.push(`wbk-med${d}`)):vm.indexOf(a)>-1?(n.classes.push(`chr-lrg${u}`),n.classes.push(`wbk-lrg${d}`)):l?
n.classes.push("wbk-vec"):i&&n.classes.push("wbk-acc")}else i&&n.classes.push("wbk-acc");return new S(r,[pe(e.base,t),n])},Am=new Set(["\\acute","\\check","\\gra\
ve","\\ddot","\\dddot","\\ddddot","\\tilde","\\bar","\\breve","\\check","\\hat","\\vec","\\dot","\\mathring"]),Tm=new Set(["\\acute","\\bar","\\breve","\\check",
"\\dot","\\ddot","\\grave","\\hat","\\mathring","\\`","\\'","\\^","\\=","\\u","\\.",'\\"',"\\r","\\H","\\v"]),gs={"\\`":"\u0300","\\'":"\u0301","\\^":"\u0302","\
\\~":"\u0303","\\=":"\u0304","\\u":"\u0306","\\.":"\u0307",'\\"':"\u0308","\\r":"\u030A","\\H":"\u030B","\\v":"\u030C","\\c":"\u0327"};U({type:"accent",names:["\
\\acute","\\grave","\\ddot","\\dddot","\\ddddot","\\tilde","\\bar","\\breve","\\check","\\hat","\\vec","\\dot","\\mathring","\\overparen","\\widecheck","\\wideha\
t","\\wideparen","\\widetilde","\\overrightarrow","\\overleftarrow","\\Overrightarrow","\\overleftrightarrow","\\overgroup","\\overleftharpoon","\\overrightharpo\
on"],props:{numArgs:1},handler:(e,t)=>{let n=pn(t[0]),r=!Am.has(e.funcName);return{type:"accent",mode:e.parser.mode,label:e.funcName,isStretchy:r,base:n}},mathmlBuilder:Zs});
U({type:"accent",names:["\\'","\\`","\\^","\\~","\\=","\\c","\\u","\\.",'\\"',"\\r","\\H","\\v"],props:{numArgs:1,allowedInText:!0,allowedInMath:!0,argTypes:["p\
rimitive"]},handler:(e,t)=>{let n=pn(t[0]),r=e.parser.mode;return r==="math"&&e.parser.settings.strict&&console.log(`Temml parse error: Command ${e.funcName} is\
 invalid in math mode.`),r==="text"&&n.text&&n.text.length===1&&e.funcName in gs&&Ks.indexOf(n.text)>-1?{type:"textord",mode:"text",text:n.text+gs[e.funcName]}:
e.funcName==="\\c"&&r==="text"&&n.text&&n.text.length===1?{type:"textord",mode:"text",text:n.text+"\u0327"}:{type:"accent",mode:r,label:e.funcName,isStretchy:!1,
base:n}},mathmlBuilder:Zs});U({type:"accentUnder",names:["\\underleftarrow","\\underrightarrow","\\underleftrightarrow","\\undergroup","\\underparen","\\utilde"],
props:{numArgs:1},handler:({parser:e,funcName:t},n)=>{let r=n[0];return{type:"accentUnder",mode:e.mode,label:t,base:r}},mathmlBuilder:(e,t)=>{let n=Vs(e);return n.
style["math-depth"]=0,new S("munder",[pe(e.base,t),n])}});var bs={pt:800/803,pc:12*800/803,dd:1238/1157*800/803,cc:14856/1157*800/803,nd:685/642*800/803,nc:1370/
107*800/803,sp:1/65536*800/803,mm:25.4/72,cm:2.54/72,in:1/72,px:96/72},Nm=["em","ex","mu","pt","mm","cm","in","px","bp","pc","dd","cc","nd","nc","sp"],Ys=function(e){
return typeof e!="string"&&(e=e.unit),Nm.indexOf(e)>-1},Xs=e=>{let t=Math.max(e-1,0);return[1,.7,.5][t]},it=function(e,t){let n=e.number;if(t.maxSize[0]<0&&n>0)
return{number:0,unit:"em"};let r=e.unit;switch(r){case"mm":case"cm":case"in":case"px":return n*bs[r]>t.maxSize[1]?{number:t.maxSize[1],unit:"pt"}:{number:n,unit:r};case"\
em":case"ex":return r==="ex"&&(n*=.431),n=Math.min(n/Xs(t.level),t.maxSize[0]),{number:li(n),unit:"em"};case"bp":return n>t.maxSize[1]&&(n=t.maxSize[1]),{number:n,
unit:"pt"};case"pt":case"pc":case"dd":case"cc":case"nd":case"nc":case"sp":return n=Math.min(n*bs[r],t.maxSize[1]),{number:li(n),unit:"pt"};case"mu":return n=Math.
min(n/18,t.maxSize[0]),{number:li(n),unit:"em"};default:throw new B("Invalid unit: '"+r+"'")}},Te=e=>{let t=new S("mspace");return t.setAttribute("width",e+"em"),
t},Yn=(e,t=.3,n=0,r=!1)=>{if(e==null&&n===0)return Te(t);let i=e?[e]:[];if(t!==0&&i.unshift(Te(t)),n>0&&i.push(Te(n)),r){let o=new S("mpadded",i);return o.setAttribute(
"height","0.1px"),o}else return new S("mrow",i)},ui=(e,t)=>Number(e)/Xs(t),bi=(e,t,n,r)=>{let i=Ni(e),o=e.slice(1,3)==="eq",a=e.charAt(1)==="x"?"1.75":e.slice(2,
4)==="cd"?"3.0":o?"1.0":"2.0";i.setAttribute("lspace","0"),i.setAttribute("rspace",o?"0.5em":"0");let l=r.withLevel(r.level<2?2:3),u=ui(a,l.level),d=ui(a,3),p=Yn(
null,u.toFixed(4),0),m=Yn(null,d.toFixed(4),0),h=ui(o?0:.3,l.level).toFixed(4),f,_,C=t&&t.body&&(t.body.body||t.body.length>0);if(C){let v=pe(t,l);v=Yn(v,h,h,e===
"\\\\cdrightarrow"||e==="\\\\cdleftarrow"),f=new S("mover",[v,m])}let T=n&&n.body&&(n.body.body||n.body.length>0);if(T){let v=pe(n,l);v=Yn(v,h,h),_=new S("munde\
r",[v,m])}let E;return!C&&!T?E=new S("mover",[i,p]):C&&T?E=new S("munderover",[i,_,f]):C?E=new S("mover",[i,f]):E=new S("munder",[i,_]),a==="3.0"&&(E.style.height=
"1em"),E.setAttribute("accent","false"),E};U({type:"xArrow",names:["\\xleftarrow","\\xrightarrow","\\xLeftarrow","\\xRightarrow","\\xleftrightarrow","\\xLeftrigh\
tarrow","\\xhookleftarrow","\\xhookrightarrow","\\xmapsto","\\xrightharpoondown","\\xrightharpoonup","\\xleftharpoondown","\\xleftharpoonup","\\xlongequal","\\xt\
woheadrightarrow","\\xtwoheadleftarrow","\\xtofrom","\\xleftrightharpoons","\\xrightleftharpoons","\\yields","\\yieldsLeft","\\mesomerism","\\longrightharpoonup",
"\\longleftharpoondown","\\yieldsLeftRight","\\chemequilibrium","\\\\cdrightarrow","\\\\cdleftarrow","\\\\cdlongequal"],props:{numArgs:1,numOptionalArgs:1},handler({
parser:e,funcName:t},n,r){return{type:"xArrow",mode:e.mode,name:t,body:n[0],below:r[0]}},mathmlBuilder(e,t){let r=[bi(e.name,e.body,e.below,t)];return r.unshift(
Te(.2778)),r.push(Te(.2778)),new S("mrow",r)}});var xs={"\\equilibriumRight":["\\longrightharpoonup","\\eqleftharpoondown"],"\\equilibriumLeft":["\\eqrightharpoo\
nup","\\longleftharpoondown"]};U({type:"stackedArrow",names:["\\equilibriumRight","\\equilibriumLeft"],props:{numArgs:1,numOptionalArgs:1},handler({parser:e,funcName:t},n,r){
let i=n[0]?{type:"hphantom",mode:e.mode,body:n[0]}:null,o=r[0]?{type:"hphantom",mode:e.mode,body:r[0]}:null;return{type:"stackedArrow",mode:e.mode,name:t,body:n[0],
upperArrowBelow:o,lowerArrowBody:i,below:r[0]}},mathmlBuilder(e,t){let n=xs[e.name][0],r=xs[e.name][1],i=bi(n,e.body,e.upperArrowBelow,t),o=bi(r,e.lowerArrowBody,
e.below,t),a,l=new S("mpadded",[i]);if(l.setAttribute("voffset","0.3em"),l.setAttribute("height","+0.3em"),l.setAttribute("depth","-0.3em"),e.name==="\\equilibri\
umLeft"){let u=new S("mpadded",[o]);u.setAttribute("width","0.5em"),a=new S("mpadded",[Te(.2778),u,l,Te(.2778)])}else l.setAttribute("width",e.name==="\\equilibr\
iumRight"?"0.5em":"0"),a=new S("mpadded",[Te(.2778),l,o,Te(.2778)]);return a.setAttribute("voffset","-0.18em"),a.setAttribute("height","-0.18em"),a.setAttribute(
"depth","+0.18em"),a}});var Qs={};function Ke({type:e,names:t,props:n,handler:r,mathmlBuilder:i}){let o={type:e,numArgs:n.numArgs||0,allowedInText:!1,numOptionalArgs:0,
handler:r};for(let a=0;a<t.length;++a)Qs[t[a]]=o;i&&(er[e]=i)}function ae(e,t){if(!e||e.type!==t)throw new Error(`Expected node of type ${t}, but got `+(e?`node\
 of type ${e.type}`:String(e)));return e}function Ci(e){let t=cr(e);if(!t)throw new Error("Expected node of symbol group type, but got "+(e?`node of type ${e.type}`:
String(e)));return t}function cr(e){return e&&(e.type==="atom"||e.type==="delimiter"||Object.prototype.hasOwnProperty.call(gm,e.type))?e:null}var Cm={">":"\\\\cdr\
ightarrow","<":"\\\\cdleftarrow","=":"\\\\cdlongequal",A:"\\uparrow",V:"\\downarrow","|":"\\Vert",".":"no arrow"},ys=()=>({type:"styling",body:[],mode:"math",scriptLevel:"\
display"}),ws=e=>e.type==="textord"&&e.text==="@",Om=(e,t)=>(e.type==="mathord"||e.type==="atom")&&e.text===t;function Im(e,t,n){let r=Cm[e];switch(r){case"\\\\cd\
rightarrow":case"\\\\cdleftarrow":return n.callFunction(r,[t[0]],[t[1]]);case"\\uparrow":case"\\downarrow":{let i=n.callFunction("\\\\cdleft",[t[0]],[]),o={type:"\
atom",text:r,mode:"math",family:"rel"},a=n.callFunction("\\Big",[o],[]),l=n.callFunction("\\\\cdright",[t[1]],[]),u={type:"ordgroup",mode:"math",body:[i,a,l],semisimple:!0};
return n.callFunction("\\\\cdparent",[u],[])}case"\\\\cdlongequal":return n.callFunction("\\\\cdlongequal",[],[]);case"\\Vert":{let i={type:"textord",text:"\\Ver\
t",mode:"math"};return n.callFunction("\\Big",[i],[])}default:return{type:"textord",text:" ",mode:"math"}}}function Rm(e){let t=[];for(e.gullet.beginGroup(),e.gullet.
macros.set("\\cr","\\\\\\relax"),e.gullet.beginGroup();;){t.push(e.parseExpression(!1,"\\\\")),e.gullet.endGroup(),e.gullet.beginGroup();let i=e.fetch().text;if(i===
"&"||i==="\\\\")e.consume();else if(i==="\\end"){t[t.length-1].length===0&&t.pop();break}else throw new B("Expected \\\\ or \\cr or \\end",e.nextToken)}let n=[],
r=[n];for(let i=0;i<t.length;i++){let o=t[i],a=ys();for(let l=0;l<o.length;l++)if(!ws(o[l]))a.body.push(o[l]);else{n.push(a),l+=1;let u=Ci(o[l]).text,d=new Array(
2);if(d[0]={type:"ordgroup",mode:"math",body:[]},d[1]={type:"ordgroup",mode:"math",body:[]},!("=|.".indexOf(u)>-1))if("<>AV".indexOf(u)>-1)for(let m=0;m<2;m++){
let h=!0;for(let f=l+1;f<o.length;f++){if(Om(o[f],u)){h=!1,l=f;break}if(ws(o[f]))throw new B("Missing a "+u+" character to complete a CD arrow.",o[f]);d[m].body.
push(o[f])}if(h)throw new B("Missing a "+u+" character to complete a CD arrow.",o[l])}else throw new B('Expected one of "<>AV=|." after @.');let p=Im(u,d,e);n.push(
p),a=ys()}i%2===0?n.push(a):n.shift(),n=[],r.push(n)}return r.pop(),e.gullet.endGroup(),e.gullet.endGroup(),{type:"array",mode:"math",body:r,tags:null,labels:new Array(
r.length+1).fill(""),envClasses:["jot","cd"],cols:[],hLinesBeforeRow:new Array(r.length+1).fill([])}}U({type:"cdlabel",names:["\\\\cdleft","\\\\cdright"],props:{
numArgs:1},handler({parser:e,funcName:t},n){return{type:"cdlabel",mode:e.mode,side:t.slice(4),label:n[0]}},mathmlBuilder(e,t){if(e.label.body.length===0)return new S(
"mrow",t);let n=pe(e.label,t);e.side==="left"&&n.classes.push("tml-shift-left");let r=new S("mtd",[n]);r.style.padding="0";let i=new S("mtr",[r]),o=new S("mtabl\
e",[i]),a=new S("mpadded",[o]);return a.setAttribute("width","0.1px"),a.setAttribute("displaystyle","false"),a.setAttribute("scriptlevel","1"),a}});U({type:"cdl\
abelparent",names:["\\\\cdparent"],props:{numArgs:1},handler({parser:e},t){return{type:"cdlabelparent",mode:e.mode,fragment:t[0]}},mathmlBuilder(e,t){return new S(
"mrow",[pe(e.fragment,t)])}});var js=e=>({type:"ordgroup",mode:"math",body:e,semisimple:!0}),di=(e,t)=>({type:t,mode:"math",body:js(e)}),Dm=(e,t)=>{let n=e.body;
n[0].shift();let r=new Array(n.length-1).fill().map(()=>[]);for(let m=1;m<n.length;m++){r[m-1].push(n[m].shift());let h=[];for(let f=0;f<n[m].length;f++)h.push(
n[m][f]);r[m-1].push(di(h,"vphantom"))}let i=new Array(n.length).fill().map(()=>[]);for(let m=0;m<n[0].length;m++)i[0].push(n[0][m]);for(let m=1;m<n.length;m++)
for(let h=0;h<n[0].length;h++)i[m].push(di(n[m][h].body,"hphantom"));for(let m=0;m<n[0].length;m++)n[0][m]=di(n[0][m].body,"hphantom");let o={type:"array",mode:"\
math",body:r,cols:[{type:"align",align:"c"}],rowGaps:new Array(r.length-1).fill(null),hLinesBeforeRow:new Array(r.length+1).fill().map(()=>[]),envClasses:[],scriptLevel:"\
text",arraystretch:1,labels:new Array(r.length).fill(""),arraycolsep:{number:.04,unit:"em"}},l={type:"styling",mode:"math",scriptLevel:"text",body:[{type:"array",
mode:"math",body:i,cols:new Array(i.length).fill({type:"align",align:"c"}),rowGaps:new Array(i.length-1).fill(null),hLinesBeforeRow:new Array(i.length+1).fill().
map(()=>[]),envClasses:[],scriptLevel:"text",arraystretch:1,labels:new Array(i.length).fill(""),arraycolsep:null}]},p={type:"supsub",mode:"math",stack:!0,base:{
type:"op",mode:"math",limits:!0,alwaysHandleSupSub:!0,parentIsSupSub:!0,symbol:!1,suppressBaseShift:!0,body:[{type:"leftright",mode:"math",body:[e],left:t?t[0]:
"(",right:t?t[1]:")",rightColor:void 0}]},sup:l,sub:null};return js([o,p])},ze=class e{constructor(t,n,r){this.lexer=t,this.start=n,this.end=r}static range(t,n){
return n?!t||!t.loc||!n.loc||t.loc.lexer!==n.loc.lexer?null:new e(t.loc.lexer,t.loc.start,n.loc.end):t&&t.loc}},Ge=class e{constructor(t,n){this.text=t,this.loc=
n}range(t,n){return new e(n,ze.range(this,t))}},we={DISPLAY:0,TEXT:1,SCRIPT:2,SCRIPTSCRIPT:3},Js=Object.create(null);function g(e,t){Js[e]=t}var Mm=Js;g("\\noexp\
and",function(e){let t=e.popToken();return e.isExpandable(t.text)&&(t.noexpand=!0,t.treatAsRelax=!0),{tokens:[t],numArgs:0}});g("\\expandafter",function(e){let t=e.
popToken();return e.expandOnce(!0),{tokens:[t],numArgs:0}});g("\\@firstoftwo",function(e){return{tokens:e.consumeArgs(2)[0],numArgs:0}});g("\\@secondoftwo",function(e){
return{tokens:e.consumeArgs(2)[1],numArgs:0}});g("\\@ifnextchar",function(e){let t=e.consumeArgs(3);e.consumeSpaces();let n=e.future();return t[0].length===1&&t[0][0].
text===n.text?{tokens:t[1],numArgs:0}:{tokens:t[2],numArgs:0}});g("\\@ifstar","\\@ifnextchar *{\\@firstoftwo{#1}}");g("\\TextOrMath",function(e){let t=e.consumeArgs(
2);return e.mode==="text"?{tokens:t[0],numArgs:0}:{tokens:t[1],numArgs:0}});var xi=e=>{let t="";for(let n=e.length-1;n>-1;n--)t+=e[n].text;return t},Oi={0:0,1:1,
2:2,3:3,4:4,5:5,6:6,7:7,8:8,9:9,a:10,A:10,b:11,B:11,c:12,C:12,d:13,D:13,e:14,E:14,f:15,F:15},_s=e=>{let t=e.future().text;return t==="EOF"?[null,""]:[Oi[t.charAt(
0)],t]},Es=(e,t,n)=>{for(let r=1;r<t.length;r++){let i=Oi[t.charAt(r)];e*=n,e+=i}return e};g("\\char",function(e){let t=e.popToken(),n,r="";if(t.text==="'")n=8,
t=e.popToken();else if(t.text==='"')n=16,t=e.popToken();else if(t.text==="`")if(t=e.popToken(),t.text[0]==="\\")r=t.text.charCodeAt(1);else{if(t.text==="EOF")throw new B(
"\\char` missing argument");r=t.text.charCodeAt(0)}else n=10;if(n){let i=t.text;if(r=Oi[i.charAt(0)],r==null||r>=n)throw new B(`Invalid base-${n} digit ${t.text}`);
r=Es(r,i,n);let o;for([o,i]=_s(e);o!=null&&o<n;)r*=n,r+=o,r=Es(r,i,n),e.popToken(),[o,i]=_s(e)}return`\\@char{${r}}`});function Ii(e){let t=e.consumeArgs(1)[0],
n="",r=t[t.length-1].loc.start;for(let i=t.length-1;i>=0;i--){let o=t[i].loc.start;o>r&&(n+=" ",r=o),n+=t[i].text,r+=t[i].text.length}return n}g("\\surd","\\sqrt\
{\\vphantom{|}}");g("\u2295","\\oplus");g("\\long","");g("\\bgroup","{");g("\\egroup","}");g("~","\\nobreakspace");g("\\lq","`");g("\\rq","'");g("\\aa","\\r a");
g("\\Bbbk","\\Bbb{k}");g("\\mathstrut","\\vphantom{(}");g("\\underbar","\\underline{\\text{#1}}");g("\\vdots","{\\varvdots\\rule{0pt}{15pt}}");g("\u22EE","\\vdot\
s");g("\\arraystretch","1");g("\\arraycolsep","6pt");g("\\substack","\\begin{subarray}{c}#1\\end{subarray}");g("\\iff","\\DOTSB\\;\\Longleftrightarrow\\;");g("\\\
implies","\\DOTSB\\;\\Longrightarrow\\;");g("\\impliedby","\\DOTSB\\;\\Longleftarrow\\;");var ks={",":"\\dotsc","\\not":"\\dotsb","+":"\\dotsb","=":"\\dotsb","<":"\
\\dotsb",">":"\\dotsb","-":"\\dotsb","*":"\\dotsb",":":"\\dotsb","\\DOTSB":"\\dotsb","\\coprod":"\\dotsb","\\bigvee":"\\dotsb","\\bigwedge":"\\dotsb","\\biguplus":"\
\\dotsb","\\bigcap":"\\dotsb","\\bigcup":"\\dotsb","\\prod":"\\dotsb","\\sum":"\\dotsb","\\bigotimes":"\\dotsb","\\bigoplus":"\\dotsb","\\bigodot":"\\dotsb","\\b\
igsqcap":"\\dotsb","\\bigsqcup":"\\dotsb","\\bigtimes":"\\dotsb","\\And":"\\dotsb","\\longrightarrow":"\\dotsb","\\Longrightarrow":"\\dotsb","\\longleftarrow":"\
\\dotsb","\\Longleftarrow":"\\dotsb","\\longleftrightarrow":"\\dotsb","\\Longleftrightarrow":"\\dotsb","\\mapsto":"\\dotsb","\\longmapsto":"\\dotsb","\\hookright\
arrow":"\\dotsb","\\doteq":"\\dotsb","\\mathbin":"\\dotsb","\\mathrel":"\\dotsb","\\relbar":"\\dotsb","\\Relbar":"\\dotsb","\\xrightarrow":"\\dotsb","\\xleftarro\
w":"\\dotsb","\\DOTSI":"\\dotsi","\\int":"\\dotsi","\\oint":"\\dotsi","\\iint":"\\dotsi","\\iiint":"\\dotsi","\\iiiint":"\\dotsi","\\DOTSX":"\\dotsx"};g("\\dots",
function(e){let t="\\dotso",n=e.expandAfterFuture().text;return n in ks?t=ks[n]:(n.slice(0,4)==="\\not"||n in Ee.math&&["bin","rel"].includes(Ee.math[n].group))&&
(t="\\dotsb"),t});var Ri={")":!0,"]":!0,"\\rbrack":!0,"\\}":!0,"\\rbrace":!0,"\\rangle":!0,"\\rceil":!0,"\\rfloor":!0,"\\rgroup":!0,"\\rmoustache":!0,"\\right":!0,
"\\bigr":!0,"\\biggr":!0,"\\Bigr":!0,"\\Biggr":!0,$:!0,";":!0,".":!0,",":!0};g("\\dotso",function(e){return e.future().text in Ri?"\\ldots\\,":"\\ldots"});g("\\d\
otsc",function(e){let t=e.future().text;return t in Ri&&t!==","?"\\ldots\\,":"\\ldots"});g("\\cdots",function(e){return e.future().text in Ri?"\\@cdots\\,":"\\@c\
dots"});g("\\dotsb","\\cdots");g("\\dotsm","\\cdots");g("\\dotsi","\\!\\cdots");g("\\idotsint","\\int\\!\\cdots\\!\\int");g("\\dotsx","\\ldots\\,");g("\\DOTSI",
"\\relax");g("\\DOTSB","\\relax");g("\\DOTSX","\\relax");g("\\tmspace","\\TextOrMath{\\kern#1#3}{\\mskip#1#2}\\relax");g("\\,","{\\tmspace+{3mu}{.1667em}}");g("\
\\thinspace","\\,");g("\\>","\\mskip{4mu}");g("\\:","{\\tmspace+{4mu}{.2222em}}");g("\\medspace","\\:");g("\\;","{\\tmspace+{5mu}{.2777em}}");g("\\thickspace","\
\\;");g("\\!","{\\tmspace-{3mu}{.1667em}}");g("\\negthinspace","\\!");g("\\negmedspace","{\\tmspace-{4mu}{.2222em}}");g("\\negthickspace","{\\tmspace-{5mu}{.277e\
m}}");g("\\enspace","\\kern.5em ");g("\\enskip","\\hskip.5em\\relax");g("\\quad","\\hskip1em\\relax");g("\\qquad","\\hskip2em\\relax");g("\\AA","\\TextOrMath{\\An\
gstrom}{\\mathring{A}}\\relax");g("\\tag","\\@ifstar\\tag@literal\\tag@paren");g("\\tag@paren","\\tag@literal{({#1})}");g("\\tag@literal",e=>{if(e.macros.get("\\\
df@tag"))throw new B("Multiple \\tag");return"\\gdef\\df@tag{\\text{#1}}"});g("\\notag","\\nonumber");g("\\nonumber","\\gdef\\@eqnsw{0}");g("\\bmod","\\mathbin{\\\
text{mod}}");g("\\pod","\\allowbreak\\mathchoice{\\mkern18mu}{\\mkern8mu}{\\mkern8mu}{\\mkern8mu}(#1)");g("\\pmod","\\pod{{\\rm mod}\\mkern6mu#1}");g("\\mod","\\\
allowbreak\\mathchoice{\\mkern18mu}{\\mkern12mu}{\\mkern12mu}{\\mkern12mu}{\\rm mod}\\,\\,#1");g("\\newline","\\\\\\relax");g("\\TeX","\\textrm{T}\\kern-.1667em\\r\
aisebox{-.5ex}{E}\\kern-.125em\\textrm{X}");g("\\LaTeX","\\textrm{L}\\kern-.35em\\raisebox{0.2em}{\\scriptstyle A}\\kern-.15em\\TeX");g("\\Temml","\\textrm{T}\\ke\
rn-0.2em\\lower{0.2em}{\\textrm{E}}\\kern-0.08em{\\textrm{M}\\kern-0.08em\\raise{0.2em}\\textrm{M}\\kern-0.08em\\textrm{L}}");g("\\hspace","\\@ifstar\\@hspacer\\@h\
space");g("\\@hspace","\\hskip #1\\relax");g("\\@hspacer","\\rule{0pt}{0pt}\\hskip #1\\relax");g("\\colon",'\\mathpunct{\\char"3a}');g("\\prescript","\\pres@crip\
t{_{#1}^{#2}}{}{#3}");g("\\ordinarycolon",'\\char"3a');g("\\vcentcolon","\\mathrel{\\raisebox{0.035em}{\\ordinarycolon}}");g("\\coloneq",'\\mathrel{\\raisebox{0.0\
35em}{\\ordinarycolon}\\char"2212}');g("\\Coloneq",'\\mathrel{\\char"2237\\char"2212}');g("\\Eqqcolon",'\\mathrel{\\char"3d\\char"2237}');g("\\Eqcolon",'\\mathre\
l{\\char"2212\\char"2237}');g("\\colonapprox",'\\mathrel{\\raisebox{0.035em}{\\ordinarycolon}\\char"2248}');g("\\Colonapprox",'\\mathrel{\\char"2237\\char"2248}');
g("\\colonsim",'\\mathrel{\\raisebox{0.035em}{\\ordinarycolon}\\char"223c}');g("\\Colonsim",'\\mathrel{\\raisebox{0.035em}{\\ordinarycolon}\\char"223c}');g("\\ra\
tio","\\vcentcolon");g("\\coloncolon","\\dblcolon");g("\\colonequals","\\coloneqq");g("\\coloncolonequals","\\Coloneqq");g("\\equalscolon","\\eqqcolon");g("\\equ\
alscoloncolon","\\Eqqcolon");g("\\colonminus","\\coloneq");g("\\coloncolonminus","\\Coloneq");g("\\minuscolon","\\eqcolon");g("\\minuscoloncolon","\\Eqcolon");g(
"\\coloncolonapprox","\\Colonapprox");g("\\coloncolonsim","\\Colonsim");g("\\notni","\\mathrel{\\char`\u220C}");g("\\limsup","\\DOTSB\\operatorname*{lim\\,sup}");
g("\\liminf","\\DOTSB\\operatorname*{lim\\,inf}");g("\\injlim","\\DOTSB\\operatorname*{inj\\,lim}");g("\\projlim","\\DOTSB\\operatorname*{proj\\,lim}");g("\\varl\
imsup","\\DOTSB\\operatorname*{\\overline{\\text{lim}}}");g("\\varliminf","\\DOTSB\\operatorname*{\\underline{\\text{lim}}}");g("\\varinjlim","\\DOTSB\\operatorna\
me*{\\underrightarrow{\\text{lim}}}");g("\\varprojlim","\\DOTSB\\operatorname*{\\underleftarrow{\\text{lim}}}");g("\\centerdot","{\\medspace\\rule{0.167em}{0.189e\
m}\\medspace}");g("\\argmin","\\DOTSB\\operatorname*{arg\\,min}");g("\\argmax","\\DOTSB\\operatorname*{arg\\,max}");g("\\plim","\\DOTSB\\operatorname*{plim}");g(
"\\leftmodels","\\mathop{\\reflectbox{$\\models$}}");g("\\bra","\\mathinner{\\langle{#1}|}");g("\\ket","\\mathinner{|{#1}\\rangle}");g("\\braket","\\mathinner{\\l\
angle{#1}\\rangle}");g("\\Bra","\\left\\langle#1\\right|");g("\\Ket","\\left|#1\\right\\rangle");var el=(e,t)=>{let r=`}\\,\\middle${t[0]==="|"?"\\vert":"\\Vert"}\
\\,{`;return e.slice(0,t.index)+r+e.slice(t.index+t[0].length)};g("\\Braket",function(e){let t=Ii(e),n=/\|\||\||\\\|/g,r;for(;(r=n.exec(t))!==null;)t=el(t,r);return"\
\\left\\langle{"+t+"}\\right\\rangle"});g("\\Set",function(e){let t=Ii(e),n=/\|\||\||\\\|/.exec(t);return n&&(t=el(t,n)),"\\left\\{\\:{"+t+"}\\:\\right\\}"});g(
"\\set",function(e){return"\\{{"+Ii(e).replace(/\|/,"}\\mid{")+"}\\}"});g("\\angln","{\\angl n}");g("\\odv","\\@ifstar\\odv@next\\odv@numerator");g("\\odv@numera\
tor","\\frac{\\mathrm{d}#1}{\\mathrm{d}#2}");g("\\odv@next","\\frac{\\mathrm{d}}{\\mathrm{d}#2}#1");g("\\pdv","\\@ifstar\\pdv@next\\pdv@numerator");var tl=e=>{let t=e[0][0].
text,n=xi(e[1]).split(","),r=String(n.length),i=r==="1"?"\\partial":`\\partial^${r}`,o="";return n.map(a=>{o+="\\partial "+a.trim()+"\\,"}),[t,i,o.replace(/\\,$/,
"")]};g("\\pdv@numerator",function(e){let[t,n,r]=tl(e.consumeArgs(2));return`\\frac{${n} ${t}}{${r}}`});g("\\pdv@next",function(e){let[t,n,r]=tl(e.consumeArgs(2));
return`\\frac{${n}}{${r}} ${t}`});g("\\upalpha","\\up@greek{\\alpha}");g("\\upbeta","\\up@greek{\\beta}");g("\\upgamma","\\up@greek{\\gamma}");g("\\updelta","\\u\
p@greek{\\delta}");g("\\upepsilon","\\up@greek{\\epsilon}");g("\\upzeta","\\up@greek{\\zeta}");g("\\upeta","\\up@greek{\\eta}");g("\\uptheta","\\up@greek{\\theta}");
g("\\upiota","\\up@greek{\\iota}");g("\\upkappa","\\up@greek{\\kappa}");g("\\uplambda","\\up@greek{\\lambda}");g("\\upmu","\\up@greek{\\mu}");g("\\upnu","\\up@gr\
eek{\\nu}");g("\\upxi","\\up@greek{\\xi}");g("\\upomicron","\\up@greek{\\omicron}");g("\\uppi","\\up@greek{\\pi}");g("\\upalpha","\\up@greek{\\alpha}");g("\\uprh\
o","\\up@greek{\\rho}");g("\\upsigma","\\up@greek{\\sigma}");g("\\uptau","\\up@greek{\\tau}");g("\\upupsilon","\\up@greek{\\upsilon}");g("\\upphi","\\up@greek{\\p\
hi}");g("\\upchi","\\up@greek{\\chi}");g("\\uppsi","\\up@greek{\\psi}");g("\\upomega","\\up@greek{\\omega}");g("\\invamp",'\\mathbin{\\char"214b}');g("\\parr",'\
\\mathbin{\\char"214b}');g("\\upand",'\\mathbin{\\char"214b}');g("\\with",'\\mathbin{\\char"26}');g("\\multimapinv",'\\mathrel{\\char"27dc}');g("\\multimapboth",
'\\mathrel{\\char"29df}');g("\\scoh",'{\\mkern5mu\\char"2322\\mkern5mu}');g("\\sincoh",'{\\mkern5mu\\char"2323\\mkern5mu}');g("\\coh",`{\\mkern5mu\\rule{}{0.7em}\\\
mathrlap{\\smash{\\raise2mu{\\char"2322}}}
{\\smash{\\lower4mu{\\char"2323}}}\\mkern5mu}`);g("\\incoh",`{\\mkern5mu\\rule{}{0.7em}\\mathrlap{\\smash{\\raise2mu{\\char"2323}}}
{\\smash{\\lower4mu{\\char"2322}}}\\mkern5mu}`);g("\\standardstate","\\text{\\tiny\\char`\u29B5}");g("\\ce",function(e){return nl(e.consumeArgs(1)[0],"ce")});g(
"\\pu",function(e){return nl(e.consumeArgs(1)[0],"pu")});g("\\uniDash","{\\rule{0.672em}{0.06em}}");g("\\triDash","{\\rule{0.15em}{0.06em}\\kern2mu\\rule{0.15em}{0\
.06em}\\kern2mu\\rule{0.15em}{0.06em}}");g("\\tripleDash","\\kern0.075em\\raise0.25em{\\triDash}\\kern0.075em");g("\\tripleDashOverLine","\\kern0.075em\\mathrlap{\
\\raise0.125em{\\uniDash}}\\raise0.34em{\\triDash}\\kern0.075em");g("\\tripleDashOverDoubleLine","\\kern0.075em\\mathrlap{\\mathrlap{\\raise0.48em{\\triDash}}\\raise0\
.27em{\\uniDash}}{\\raise0.05em{\\uniDash}}\\kern0.075em");g("\\tripleDashBetweenDoubleLine","\\kern0.075em\\mathrlap{\\mathrlap{\\raise0.48em{\\uniDash}}\\raise0.27e\
m{\\triDash}}{\\raise0.05em{\\uniDash}}\\kern0.075em");var nl=function(e,t){for(var n="",r=e.length&&e[e.length-1].loc.start,i=e.length-1;i>=0;i--)e[i].loc.start>
r&&(n+=" ",r=e[i].loc.start),n+=e[i].text,r+=e[i].text.length;var o=xe.go(L.go(n,t));return o},L={go:function(e,t){if(!e)return[];t===void 0&&(t="ce");var n="0",
r={};r.parenthesisLevel=0,e=e.replace(/\n/g," "),e=e.replace(/[\u2212\u2013\u2014\u2010]/g,"-"),e=e.replace(/[\u2026]/g,"...");for(var i,o=10,a=[];;){i!==e?(o=10,
i=e):o--;var l=L.stateMachines[t],u=l.transitions[n]||l.transitions["*"];e:for(var d=0;d<u.length;d++){var p=L.patterns.match_(u[d].pattern,e);if(p){for(var m=u[d].
task,h=0;h<m.action_.length;h++){var f;if(l.actions[m.action_[h].type_])f=l.actions[m.action_[h].type_](r,p.match_,m.action_[h].option);else if(L.actions[m.action_[h].
type_])f=L.actions[m.action_[h].type_](r,p.match_,m.action_[h].option);else throw["MhchemBugA","mhchem bug A. Please report. ("+m.action_[h].type_+")"];L.concatArray(
a,f)}if(n=m.nextState||n,e.length>0){if(m.revisit||(e=p.remainder),!m.toContinue)break e}else return a}}if(o<=0)throw["MhchemBugU","mhchem bug U. Please report."]}},
concatArray:function(e,t){if(t)if(Array.isArray(t))for(var n=0;n<t.length;n++)e.push(t[n]);else e.push(t)},patterns:{patterns:{empty:/^$/,else:/^./,else2:/^./,space:/^\s/,
"space A":/^\s(?=[A-Z\\$])/,space$:/^\s$/,"a-z":/^[a-z]/,x:/^x/,x$:/^x$/,i$:/^i$/,letters:/^(?:[a-zA-Z\u03B1-\u03C9\u0391-\u03A9?@]|(?:\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?:\s+|\{\}|(?![a-zA-Z]))))+/,
"\\greek":/^\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)(?:\s+|\{\}|(?![a-zA-Z]))/,
"one lowercase latin letter $":/^(?:([a-z])(?:$|[^a-zA-Z]))$/,"$one lowercase latin letter$ $":/^\$(?:([a-z])(?:$|[^a-zA-Z]))\$$/,"one lowercase greek letter $":/^(?:\$?[\u03B1-\u03C9]\$?|\$?\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|omicron|pi|rho|sigma|tau|upsilon|phi|chi|psi|omega)\s*\$?)(?:\s+|\{\}|(?![a-zA-Z]))$/,
digits:/^[0-9]+/,"-9.,9":/^[+\-]?(?:[0-9]+(?:[,.][0-9]+)?|[0-9]*(?:\.[0-9]+))/,"-9.,9 no missing 0":/^[+\-]?[0-9]+(?:[.,][0-9]+)?/,"(-)(9.,9)(e)(99)":function(e){
var t=e.match(/^(\+\-|\+\/\-|\+|\-|\\pm\s?)?([0-9]+(?:[,.][0-9]+)?|[0-9]*(?:\.[0-9]+))?(\((?:[0-9]+(?:[,.][0-9]+)?|[0-9]*(?:\.[0-9]+))\))?(?:([eE]|\s*(\*|x|\\times|\u00D7)\s*10\^)([+\-]?[0-9]+|\{[+\-]?[0-9]+\}))?/);
return t&&t[0]?{match_:t.splice(1),remainder:e.substr(t[0].length)}:null},"(-)(9)^(-9)":function(e){var t=e.match(/^(\+\-|\+\/\-|\+|\-|\\pm\s?)?([0-9]+(?:[,.][0-9]+)?|[0-9]*(?:\.[0-9]+)?)\^([+\-]?[0-9]+|\{[+\-]?[0-9]+\})/);
return t&&t[0]?{match_:t.splice(1),remainder:e.substr(t[0].length)}:null},"state of aggregation $":function(e){var t=L.patterns.findObserveGroups(e,"",/^\([a-z]{1,3}(?=[\),])/,
")","");if(t&&t.remainder.match(/^($|[\s,;\)\]\}])/))return t;var n=e.match(/^(?:\((?:\\ca\s?)?\$[amothc]\$\))/);return n?{match_:n[0],remainder:e.substr(n[0].length)}:
null},"_{(state of aggregation)}$":/^_\{(\([a-z]{1,3}\))\}/,"{[(":/^(?:\\\{|\[|\()/,")]}":/^(?:\)|\]|\\\})/,", ":/^[,;]\s*/,",":/^[,;]/,".":/^[.]/,". ":/^([.\u22C5\u00B7\u2022])\s*/,
"...":/^\.\.\.(?=$|[^.])/,"* ":/^([*])\s*/,"^{(...)}":function(e){return L.patterns.findObserveGroups(e,"^{","","","}")},"^($...$)":function(e){return L.patterns.
findObserveGroups(e,"^","$","$","")},"^a":/^\^([0-9]+|[^\\_])/,"^\\x{}{}":function(e){return L.patterns.findObserveGroups(e,"^",/^\\[a-zA-Z]+\{/,"}","","","{","\
}","",!0)},"^\\x{}":function(e){return L.patterns.findObserveGroups(e,"^",/^\\[a-zA-Z]+\{/,"}","")},"^\\x":/^\^(\\[a-zA-Z]+)\s*/,"^(-1)":/^\^(-?\d+)/,"'":/^'/,"\
_{(...)}":function(e){return L.patterns.findObserveGroups(e,"_{","","","}")},"_($...$)":function(e){return L.patterns.findObserveGroups(e,"_","$","$","")},_9:/^_([+\-]?[0-9]+|[^\\])/,
"_\\x{}{}":function(e){return L.patterns.findObserveGroups(e,"_",/^\\[a-zA-Z]+\{/,"}","","","{","}","",!0)},"_\\x{}":function(e){return L.patterns.findObserveGroups(
e,"_",/^\\[a-zA-Z]+\{/,"}","")},"_\\x":/^_(\\[a-zA-Z]+)\s*/,"^_":/^(?:\^(?=_)|\_(?=\^)|[\^_]$)/,"{}":/^\{\}/,"{...}":function(e){return L.patterns.findObserveGroups(
e,"","{","}","")},"{(...)}":function(e){return L.patterns.findObserveGroups(e,"{","","","}")},"$...$":function(e){return L.patterns.findObserveGroups(e,"","$","\
$","")},"${(...)}$":function(e){return L.patterns.findObserveGroups(e,"${","","","}$")},"$(...)$":function(e){return L.patterns.findObserveGroups(e,"$","","","$")},
"=<>":/^[=<>]/,"#":/^[#\u2261]/,"+":/^\+/,"-$":/^-(?=[\s_},;\]/]|$|\([a-z]+\))/,"-9":/^-(?=[0-9])/,"- orbital overlap":/^-(?=(?:[spd]|sp)(?:$|[\s,;\)\]\}]))/,"-":/^-/,
"pm-operator":/^(?:\\pm|\$\\pm\$|\+-|\+\/-)/,operator:/^(?:\+|(?:[\-=<>]|<<|>>|\\approx|\$\\approx\$)(?=\s|$|-?[0-9]))/,arrowUpDown:/^(?:v|\(v\)|\^|\(\^\))(?=$|[\s,;\)\]\}])/,
"\\bond{(...)}":function(e){return L.patterns.findObserveGroups(e,"\\bond{","","","}")},"->":/^(?:<->|<-->|->|<-|<=>>|<<=>|<=>|[\u2192\u27F6\u21CC])/,CMT:/^[CMT](?=\[)/,
"[(...)]":function(e){return L.patterns.findObserveGroups(e,"[","","","]")},"1st-level escape":/^(&|\\\\|\\hline)\s*/,"\\,":/^(?:\\[,\ ;:])/,"\\x{}{}":function(e){
return L.patterns.findObserveGroups(e,"",/^\\[a-zA-Z]+\{/,"}","","","{","}","",!0)},"\\x{}":function(e){return L.patterns.findObserveGroups(e,"",/^\\[a-zA-Z]+\{/,
"}","")},"\\ca":/^\\ca(?:\s+|(?![a-zA-Z]))/,"\\x":/^(?:\\[a-zA-Z]+\s*|\\[_&{}%])/,orbital:/^(?:[0-9]{1,2}[spdfgh]|[0-9]{0,2}sp)(?=$|[^a-zA-Z])/,others:/^[\/~|]/,
"\\frac{(...)}":function(e){return L.patterns.findObserveGroups(e,"\\frac{","","","}","{","","","}")},"\\overset{(...)}":function(e){return L.patterns.findObserveGroups(
e,"\\overset{","","","}","{","","","}")},"\\underset{(...)}":function(e){return L.patterns.findObserveGroups(e,"\\underset{","","","}","{","","","}")},"\\underbr\
ace{(...)}":function(e){return L.patterns.findObserveGroups(e,"\\underbrace{","","","}_","{","","","}")},"\\color{(...)}0":function(e){return L.patterns.findObserveGroups(
e,"\\color{","","","}")},"\\color{(...)}{(...)}1":function(e){return L.patterns.findObserveGroups(e,"\\color{","","","}","{","","","}")},"\\color(...){(...)}2":function(e){
return L.patterns.findObserveGroups(e,"\\color","\\","",/^(?=\{)/,"{","","","}")},"\\ce{(...)}":function(e){return L.patterns.findObserveGroups(e,"\\ce{","","",
"}")},oxidation$:/^(?:[+-][IVX]+|\\pm\s*0|\$\\pm\$\s*0)$/,"d-oxidation$":/^(?:[+-]?\s?[IVX]+|\\pm\s*0|\$\\pm\$\s*0)$/,"roman numeral":/^[IVX]+/,"1/2$":/^[+\-]?(?:[0-9]+|\$[a-z]\$|[a-z])\/[0-9]+(?:\$[a-z]\$|[a-z])?$/,
amount:function(e){var t;if(t=e.match(/^(?:(?:(?:\([+\-]?[0-9]+\/[0-9]+\)|[+\-]?(?:[0-9]+|\$[a-z]\$|[a-z])\/[0-9]+|[+\-]?[0-9]+[.,][0-9]+|[+\-]?\.[0-9]+|[+\-]?[0-9]+)(?:[a-z](?=\s*[A-Z]))?)|[+\-]?[a-z](?=\s*[A-Z])|\+(?!\s))/),
t)return{match_:t[0],remainder:e.substr(t[0].length)};var n=L.patterns.findObserveGroups(e,"","$","$","");return n&&(t=n.match_.match(/^\$(?:\(?[+\-]?(?:[0-9]*[a-z]?[+\-])?[0-9]*[a-z](?:[+\-][0-9]*[a-z]?)?\)?|\+|-)\$$/),
t)?{match_:t[0],remainder:e.substr(t[0].length)}:null},amount2:function(e){return this.amount(e)},"(KV letters),":/^(?:[A-Z][a-z]{0,2}|i)(?=,)/,formula$:function(e){
if(e.match(/^\([a-z]+\)$/))return null;var t=e.match(/^(?:[a-z]|(?:[0-9\ \+\-\,\.\(\)]+[a-z])+[0-9\ \+\-\,\.\(\)]*|(?:[a-z][0-9\ \+\-\,\.\(\)]+)+[a-z]?)$/);return t?
{match_:t[0],remainder:e.substr(t[0].length)}:null},uprightEntities:/^(?:pH|pOH|pC|pK|iPr|iBu)(?=$|[^a-zA-Z])/,"/":/^\s*(\/)\s*/,"//":/^\s*(\/\/)\s*/,"*":/^\s*[*.]\s*/},
findObserveGroups:function(e,t,n,r,i,o,a,l,u,d){var p=function(E,v){if(typeof v=="string")return E.indexOf(v)!==0?null:v;var D=E.match(v);return D?D[0]:null},m=function(E,v,D){
for(var q=0;v<E.length;){var z=E.charAt(v),A=p(E.substr(v),D);if(A!==null&&q===0)return{endMatchBegin:v,endMatchEnd:v+A.length};if(z==="{")q++;else if(z==="}"){
if(q===0)throw["ExtraCloseMissingOpen","Extra close brace or missing open brace"];q--}v++}return q>0,null},h=p(e,t);if(h===null||(e=e.substr(h.length),h=p(e,n),
h===null))return null;var f=m(e,h.length,r||i);if(f===null)return null;var _=e.substring(0,r?f.endMatchEnd:f.endMatchBegin);if(o||a){var C=this.findObserveGroups(
e.substr(f.endMatchEnd),o,a,l,u);if(C===null)return null;var T=[_,C.match_];return{match_:d?T.join(""):T,remainder:C.remainder}}else return{match_:_,remainder:e.
substr(f.endMatchEnd)}},match_:function(e,t){var n=L.patterns.patterns[e];if(n===void 0)throw["MhchemBugP","mhchem bug P. Please report. ("+e+")"];if(typeof n==
"function")return L.patterns.patterns[e](t);var r=t.match(n);if(r){var i;return r[2]?i=[r[1],r[2]]:r[1]?i=r[1]:i=r[0],{match_:i,remainder:t.substr(r[0].length)}}
return null}},actions:{"a=":function(e,t){e.a=(e.a||"")+t},"b=":function(e,t){e.b=(e.b||"")+t},"p=":function(e,t){e.p=(e.p||"")+t},"o=":function(e,t){e.o=(e.o||
"")+t},"q=":function(e,t){e.q=(e.q||"")+t},"d=":function(e,t){e.d=(e.d||"")+t},"rm=":function(e,t){e.rm=(e.rm||"")+t},"text=":function(e,t){e.text_=(e.text_||"")+
t},insert:function(e,t,n){return{type_:n}},"insert+p1":function(e,t,n){return{type_:n,p1:t}},"insert+p1+p2":function(e,t,n){return{type_:n,p1:t[0],p2:t[1]}},copy:function(e,t){
return t},rm:function(e,t){return{type_:"rm",p1:t||""}},text:function(e,t){return L.go(t,"text")},"{text}":function(e,t){var n=["{"];return L.concatArray(n,L.go(
t,"text")),n.push("}"),n},"tex-math":function(e,t){return L.go(t,"tex-math")},"tex-math tight":function(e,t){return L.go(t,"tex-math tight")},bond:function(e,t,n){
return{type_:"bond",kind_:n||t}},"color0-output":function(e,t){return{type_:"color0",color:t[0]}},ce:function(e,t){return L.go(t)},"1/2":function(e,t){var n=[];
t.match(/^[+\-]/)&&(n.push(t.substr(0,1)),t=t.substr(1));var r=t.match(/^([0-9]+|\$[a-z]\$|[a-z])\/([0-9]+)(\$[a-z]\$|[a-z])?$/);return r[1]=r[1].replace(/\$/g,
""),n.push({type_:"frac",p1:r[1],p2:r[2]}),r[3]&&(r[3]=r[3].replace(/\$/g,""),n.push({type_:"tex-math",p1:r[3]})),n},"9,9":function(e,t){return L.go(t,"9,9")}},
createTransitions:function(e){var t,n,r,i,o={};for(t in e)for(n in e[t])for(r=n.split("|"),e[t][n].stateArray=r,i=0;i<r.length;i++)o[r[i]]=[];for(t in e)for(n in e[t])
for(r=e[t][n].stateArray||[],i=0;i<r.length;i++){var a=e[t][n];if(a.action_){a.action_=[].concat(a.action_);for(var l=0;l<a.action_.length;l++)typeof a.action_[l]==
"string"&&(a.action_[l]={type_:a.action_[l]})}else a.action_=[];for(var u=t.split("|"),d=0;d<u.length;d++)if(r[i]==="*")for(var p in o)o[p].push({pattern:u[d],task:a});else
o[r[i]].push({pattern:u[d],task:a})}return o},stateMachines:{}};L.stateMachines={ce:{transitions:L.createTransitions({empty:{"*":{action_:"output"}},else:{"0|1|\
2":{action_:"beginsWithBond=false",revisit:!0,toContinue:!0}},oxidation$:{0:{action_:"oxidation-output"}},CMT:{r:{action_:"rdt=",nextState:"rt"},rd:{action_:"rq\
t=",nextState:"rdt"}},arrowUpDown:{"0|1|2|as":{action_:["sb=false","output","operator"],nextState:"1"}},uprightEntities:{"0|1|2":{action_:["o=","output"],nextState:"\
1"}},orbital:{"0|1|2|3":{action_:"o=",nextState:"o"}},"->":{"0|1|2|3":{action_:"r=",nextState:"r"},"a|as":{action_:["output","r="],nextState:"r"},"*":{action_:[
"output","r="],nextState:"r"}},"+":{o:{action_:"d= kv",nextState:"d"},"d|D":{action_:"d=",nextState:"d"},q:{action_:"d=",nextState:"qd"},"qd|qD":{action_:"d=",nextState:"\
qd"},dq:{action_:["output","d="],nextState:"d"},3:{action_:["sb=false","output","operator"],nextState:"0"}},amount:{"0|2":{action_:"a=",nextState:"a"}},"pm-oper\
ator":{"0|1|2|a|as":{action_:["sb=false","output",{type_:"operator",option:"\\pm"}],nextState:"0"}},operator:{"0|1|2|a|as":{action_:["sb=false","output","operat\
or"],nextState:"0"}},"-$":{"o|q":{action_:["charge or bond","output"],nextState:"qd"},d:{action_:"d=",nextState:"d"},D:{action_:["output",{type_:"bond",option:"\
-"}],nextState:"3"},q:{action_:"d=",nextState:"qd"},qd:{action_:"d=",nextState:"qd"},"qD|dq":{action_:["output",{type_:"bond",option:"-"}],nextState:"3"}},"-9":{
"3|o":{action_:["output",{type_:"insert",option:"hyphen"}],nextState:"3"}},"- orbital overlap":{o:{action_:["output",{type_:"insert",option:"hyphen"}],nextState:"\
2"},d:{action_:["output",{type_:"insert",option:"hyphen"}],nextState:"2"}},"-":{"0|1|2":{action_:[{type_:"output",option:1},"beginsWithBond=true",{type_:"bond",
option:"-"}],nextState:"3"},3:{action_:{type_:"bond",option:"-"}},a:{action_:["output",{type_:"insert",option:"hyphen"}],nextState:"2"},as:{action_:[{type_:"out\
put",option:2},{type_:"bond",option:"-"}],nextState:"3"},b:{action_:"b="},o:{action_:{type_:"- after o/d",option:!1},nextState:"2"},q:{action_:{type_:"- after o\
/d",option:!1},nextState:"2"},"d|qd|dq":{action_:{type_:"- after o/d",option:!0},nextState:"2"},"D|qD|p":{action_:["output",{type_:"bond",option:"-"}],nextState:"\
3"}},amount2:{"1|3":{action_:"a=",nextState:"a"}},letters:{"0|1|2|3|a|as|b|p|bp|o":{action_:"o=",nextState:"o"},"q|dq":{action_:["output","o="],nextState:"o"},"\
d|D|qd|qD":{action_:"o after d",nextState:"o"}},digits:{o:{action_:"q=",nextState:"q"},"d|D":{action_:"q=",nextState:"dq"},q:{action_:["output","o="],nextState:"\
o"},a:{action_:"o=",nextState:"o"}},"space A":{"b|p|bp":{}},space:{a:{nextState:"as"},0:{action_:"sb=false"},"1|2":{action_:"sb=true"},"r|rt|rd|rdt|rdq":{action_:"\
output",nextState:"0"},"*":{action_:["output","sb=true"],nextState:"1"}},"1st-level escape":{"1|2":{action_:["output",{type_:"insert+p1",option:"1st-level escap\
e"}]},"*":{action_:["output",{type_:"insert+p1",option:"1st-level escape"}],nextState:"0"}},"[(...)]":{"r|rt":{action_:"rd=",nextState:"rd"},"rd|rdt":{action_:"\
rq=",nextState:"rdq"}},"...":{"o|d|D|dq|qd|qD":{action_:["output",{type_:"bond",option:"..."}],nextState:"3"},"*":{action_:[{type_:"output",option:1},{type_:"in\
sert",option:"ellipsis"}],nextState:"1"}},". |* ":{"*":{action_:["output",{type_:"insert",option:"addition compound"}],nextState:"1"}},"state of aggregation $":{
"*":{action_:["output","state of aggregation"],nextState:"1"}},"{[(":{"a|as|o":{action_:["o=","output","parenthesisLevel++"],nextState:"2"},"0|1|2|3":{action_:[
"o=","output","parenthesisLevel++"],nextState:"2"},"*":{action_:["output","o=","output","parenthesisLevel++"],nextState:"2"}},")]}":{"0|1|2|3|b|p|bp|o":{action_:[
"o=","parenthesisLevel--"],nextState:"o"},"a|as|d|D|q|qd|qD|dq":{action_:["output","o=","parenthesisLevel--"],nextState:"o"}},", ":{"*":{action_:["output","comm\
a"],nextState:"0"}},"^_":{"*":{}},"^{(...)}|^($...$)":{"0|1|2|as":{action_:"b=",nextState:"b"},p:{action_:"b=",nextState:"bp"},"3|o":{action_:"d= kv",nextState:"\
D"},q:{action_:"d=",nextState:"qD"},"d|D|qd|qD|dq":{action_:["output","d="],nextState:"D"}},"^a|^\\x{}{}|^\\x{}|^\\x|'":{"0|1|2|as":{action_:"b=",nextState:"b"},
p:{action_:"b=",nextState:"bp"},"3|o":{action_:"d= kv",nextState:"d"},q:{action_:"d=",nextState:"qd"},"d|qd|D|qD":{action_:"d="},dq:{action_:["output","d="],nextState:"\
d"}},"_{(state of aggregation)}$":{"d|D|q|qd|qD|dq":{action_:["output","q="],nextState:"q"}},"_{(...)}|_($...$)|_9|_\\x{}{}|_\\x{}|_\\x":{"0|1|2|as":{action_:"p\
=",nextState:"p"},b:{action_:"p=",nextState:"bp"},"3|o":{action_:"q=",nextState:"q"},"d|D":{action_:"q=",nextState:"dq"},"q|qd|qD|dq":{action_:["output","q="],nextState:"\
q"}},"=<>":{"0|1|2|3|a|as|o|q|d|D|qd|qD|dq":{action_:[{type_:"output",option:2},"bond"],nextState:"3"}},"#":{"0|1|2|3|a|as|o":{action_:[{type_:"output",option:2},
{type_:"bond",option:"#"}],nextState:"3"}},"{}":{"*":{action_:{type_:"output",option:1},nextState:"1"}},"{...}":{"0|1|2|3|a|as|b|p|bp":{action_:"o=",nextState:"\
o"},"o|d|D|q|qd|qD|dq":{action_:["output","o="],nextState:"o"}},"$...$":{a:{action_:"a="},"0|1|2|3|as|b|p|bp|o":{action_:"o=",nextState:"o"},"as|o":{action_:"o="},
"q|d|D|qd|qD|dq":{action_:["output","o="],nextState:"o"}},"\\bond{(...)}":{"*":{action_:[{type_:"output",option:2},"bond"],nextState:"3"}},"\\frac{(...)}":{"*":{
action_:[{type_:"output",option:1},"frac-output"],nextState:"3"}},"\\overset{(...)}":{"*":{action_:[{type_:"output",option:2},"overset-output"],nextState:"3"}},
"\\underset{(...)}":{"*":{action_:[{type_:"output",option:2},"underset-output"],nextState:"3"}},"\\underbrace{(...)}":{"*":{action_:[{type_:"output",option:2},"\
underbrace-output"],nextState:"3"}},"\\color{(...)}{(...)}1|\\color(...){(...)}2":{"*":{action_:[{type_:"output",option:2},"color-output"],nextState:"3"}},"\\col\
or{(...)}0":{"*":{action_:[{type_:"output",option:2},"color0-output"]}},"\\ce{(...)}":{"*":{action_:[{type_:"output",option:2},"ce"],nextState:"3"}},"\\,":{"*":{
action_:[{type_:"output",option:1},"copy"],nextState:"1"}},"\\x{}{}|\\x{}|\\x":{"0|1|2|3|a|as|b|p|bp|o|c0":{action_:["o=","output"],nextState:"3"},"*":{action_:[
"output","o=","output"],nextState:"3"}},others:{"*":{action_:[{type_:"output",option:1},"copy"],nextState:"3"}},else2:{a:{action_:"a to o",nextState:"o",revisit:!0},
as:{action_:["output","sb=true"],nextState:"1",revisit:!0},"r|rt|rd|rdt|rdq":{action_:["output"],nextState:"0",revisit:!0},"*":{action_:["output","copy"],nextState:"\
3"}}}),actions:{"o after d":function(e,t){var n;if((e.d||"").match(/^[0-9]+$/)){var r=e.d;e.d=void 0,n=this.output(e),e.b=r}else n=this.output(e);return L.actions["\
o="](e,t),n},"d= kv":function(e,t){e.d=t,e.dType="kv"},"charge or bond":function(e,t){if(e.beginsWithBond){var n=[];return L.concatArray(n,this.output(e)),L.concatArray(
n,L.actions.bond(e,t,"-")),n}else e.d=t},"- after o/d":function(e,t,n){var r=L.patterns.match_("orbital",e.o||""),i=L.patterns.match_("one lowercase greek lette\
r $",e.o||""),o=L.patterns.match_("one lowercase latin letter $",e.o||""),a=L.patterns.match_("$one lowercase latin letter$ $",e.o||""),l=t==="-"&&(r&&r.remainder===
""||i||o||a);l&&!e.a&&!e.b&&!e.p&&!e.d&&!e.q&&!r&&o&&(e.o="$"+e.o+"$");var u=[];return l?(L.concatArray(u,this.output(e)),u.push({type_:"hyphen"})):(r=L.patterns.
match_("digits",e.d||""),n&&r&&r.remainder===""?(L.concatArray(u,L.actions["d="](e,t)),L.concatArray(u,this.output(e))):(L.concatArray(u,this.output(e)),L.concatArray(
u,L.actions.bond(e,t,"-")))),u},"a to o":function(e){e.o=e.a,e.a=void 0},"sb=true":function(e){e.sb=!0},"sb=false":function(e){e.sb=!1},"beginsWithBond=true":function(e){
e.beginsWithBond=!0},"beginsWithBond=false":function(e){e.beginsWithBond=!1},"parenthesisLevel++":function(e){e.parenthesisLevel++},"parenthesisLevel--":function(e){
e.parenthesisLevel--},"state of aggregation":function(e,t){return{type_:"state of aggregation",p1:L.go(t,"o")}},comma:function(e,t){var n=t.replace(/\s*$/,""),r=n!==
t;return r&&e.parenthesisLevel===0?{type_:"comma enumeration L",p1:n}:{type_:"comma enumeration M",p1:n}},output:function(e,t,n){var r;if(!e.r)r=[],!e.a&&!e.b&&
!e.p&&!e.o&&!e.q&&!e.d&&!n||(e.sb&&r.push({type_:"entitySkip"}),!e.o&&!e.q&&!e.d&&!e.b&&!e.p&&n!==2?(e.o=e.a,e.a=void 0):!e.o&&!e.q&&!e.d&&(e.b||e.p)?(e.o=e.a,e.
d=e.b,e.q=e.p,e.a=e.b=e.p=void 0):e.o&&e.dType==="kv"&&L.patterns.match_("d-oxidation$",e.d||"")?e.dType="oxidation":e.o&&e.dType==="kv"&&!e.q&&(e.dType=void 0),
r.push({type_:"chemfive",a:L.go(e.a,"a"),b:L.go(e.b,"bd"),p:L.go(e.p,"pq"),o:L.go(e.o,"o"),q:L.go(e.q,"pq"),d:L.go(e.d,e.dType==="oxidation"?"oxidation":"bd"),dType:e.
dType}));else{var i;e.rdt==="M"?i=L.go(e.rd,"tex-math"):e.rdt==="T"?i=[{type_:"text",p1:e.rd||""}]:i=L.go(e.rd);var o;e.rqt==="M"?o=L.go(e.rq,"tex-math"):e.rqt===
"T"?o=[{type_:"text",p1:e.rq||""}]:o=L.go(e.rq),r={type_:"arrow",r:e.r,rd:i,rq:o}}for(var a in e)a!=="parenthesisLevel"&&a!=="beginsWithBond"&&delete e[a];return r},
"oxidation-output":function(e,t){var n=["{"];return L.concatArray(n,L.go(t,"oxidation")),n.push("}"),n},"frac-output":function(e,t){return{type_:"frac-ce",p1:L.
go(t[0]),p2:L.go(t[1])}},"overset-output":function(e,t){return{type_:"overset",p1:L.go(t[0]),p2:L.go(t[1])}},"underset-output":function(e,t){return{type_:"under\
set",p1:L.go(t[0]),p2:L.go(t[1])}},"underbrace-output":function(e,t){return{type_:"underbrace",p1:L.go(t[0]),p2:L.go(t[1])}},"color-output":function(e,t){return{
type_:"color",color1:t[0],color2:L.go(t[1])}},"r=":function(e,t){e.r=t},"rdt=":function(e,t){e.rdt=t},"rd=":function(e,t){e.rd=t},"rqt=":function(e,t){e.rqt=t},
"rq=":function(e,t){e.rq=t},operator:function(e,t,n){return{type_:"operator",kind_:n||t}}}},a:{transitions:L.createTransitions({empty:{"*":{}},"1/2$":{0:{action_:"\
1/2"}},else:{0:{nextState:"1",revisit:!0}},"$(...)$":{"*":{action_:"tex-math tight",nextState:"1"}},",":{"*":{action_:{type_:"insert",option:"commaDecimal"}}},else2:{
"*":{action_:"copy"}}}),actions:{}},o:{transitions:L.createTransitions({empty:{"*":{}},"1/2$":{0:{action_:"1/2"}},else:{0:{nextState:"1",revisit:!0}},letters:{"\
*":{action_:"rm"}},"\\ca":{"*":{action_:{type_:"insert",option:"circa"}}},"\\x{}{}|\\x{}|\\x":{"*":{action_:"copy"}},"${(...)}$|$(...)$":{"*":{action_:"tex-math"}},
"{(...)}":{"*":{action_:"{text}"}},else2:{"*":{action_:"copy"}}}),actions:{}},text:{transitions:L.createTransitions({empty:{"*":{action_:"output"}},"{...}":{"*":{
action_:"text="}},"${(...)}$|$(...)$":{"*":{action_:"tex-math"}},"\\greek":{"*":{action_:["output","rm"]}},"\\,|\\x{}{}|\\x{}|\\x":{"*":{action_:["output","copy"]}},
else:{"*":{action_:"text="}}}),actions:{output:function(e){if(e.text_){var t={type_:"text",p1:e.text_};for(var n in e)delete e[n];return t}}}},pq:{transitions:L.
createTransitions({empty:{"*":{}},"state of aggregation $":{"*":{action_:"state of aggregation"}},i$:{0:{nextState:"!f",revisit:!0}},"(KV letters),":{0:{action_:"\
rm",nextState:"0"}},formula$:{0:{nextState:"f",revisit:!0}},"1/2$":{0:{action_:"1/2"}},else:{0:{nextState:"!f",revisit:!0}},"${(...)}$|$(...)$":{"*":{action_:"t\
ex-math"}},"{(...)}":{"*":{action_:"text"}},"a-z":{f:{action_:"tex-math"}},letters:{"*":{action_:"rm"}},"-9.,9":{"*":{action_:"9,9"}},",":{"*":{action_:{type_:"\
insert+p1",option:"comma enumeration S"}}},"\\color{(...)}{(...)}1|\\color(...){(...)}2":{"*":{action_:"color-output"}},"\\color{(...)}0":{"*":{action_:"color0-\
output"}},"\\ce{(...)}":{"*":{action_:"ce"}},"\\,|\\x{}{}|\\x{}|\\x":{"*":{action_:"copy"}},else2:{"*":{action_:"copy"}}}),actions:{"state of aggregation":function(e,t){
return{type_:"state of aggregation subscript",p1:L.go(t,"o")}},"color-output":function(e,t){return{type_:"color",color1:t[0],color2:L.go(t[1],"pq")}}}},bd:{transitions:L.
createTransitions({empty:{"*":{}},x$:{0:{nextState:"!f",revisit:!0}},formula$:{0:{nextState:"f",revisit:!0}},else:{0:{nextState:"!f",revisit:!0}},"-9.,9 no miss\
ing 0":{"*":{action_:"9,9"}},".":{"*":{action_:{type_:"insert",option:"electron dot"}}},"a-z":{f:{action_:"tex-math"}},x:{"*":{action_:{type_:"insert",option:"K\
V x"}}},letters:{"*":{action_:"rm"}},"'":{"*":{action_:{type_:"insert",option:"prime"}}},"${(...)}$|$(...)$":{"*":{action_:"tex-math"}},"{(...)}":{"*":{action_:"\
text"}},"\\color{(...)}{(...)}1|\\color(...){(...)}2":{"*":{action_:"color-output"}},"\\color{(...)}0":{"*":{action_:"color0-output"}},"\\ce{(...)}":{"*":{action_:"\
ce"}},"\\,|\\x{}{}|\\x{}|\\x":{"*":{action_:"copy"}},else2:{"*":{action_:"copy"}}}),actions:{"color-output":function(e,t){return{type_:"color",color1:t[0],color2:L.
go(t[1],"bd")}}}},oxidation:{transitions:L.createTransitions({empty:{"*":{}},"roman numeral":{"*":{action_:"roman-numeral"}},"${(...)}$|$(...)$":{"*":{action_:"\
tex-math"}},else:{"*":{action_:"copy"}}}),actions:{"roman-numeral":function(e,t){return{type_:"roman numeral",p1:t||""}}}},"tex-math":{transitions:L.createTransitions(
{empty:{"*":{action_:"output"}},"\\ce{(...)}":{"*":{action_:["output","ce"]}},"{...}|\\,|\\x{}{}|\\x{}|\\x":{"*":{action_:"o="}},else:{"*":{action_:"o="}}}),actions:{
output:function(e){if(e.o){var t={type_:"tex-math",p1:e.o};for(var n in e)delete e[n];return t}}}},"tex-math tight":{transitions:L.createTransitions({empty:{"*":{
action_:"output"}},"\\ce{(...)}":{"*":{action_:["output","ce"]}},"{...}|\\,|\\x{}{}|\\x{}|\\x":{"*":{action_:"o="}},"-|+":{"*":{action_:"tight operator"}},else:{
"*":{action_:"o="}}}),actions:{"tight operator":function(e,t){e.o=(e.o||"")+"{"+t+"}"},output:function(e){if(e.o){var t={type_:"tex-math",p1:e.o};for(var n in e)
delete e[n];return t}}}},"9,9":{transitions:L.createTransitions({empty:{"*":{}},",":{"*":{action_:"comma"}},else:{"*":{action_:"copy"}}}),actions:{comma:function(){
return{type_:"commaDecimal"}}}},pu:{transitions:L.createTransitions({empty:{"*":{action_:"output"}},space$:{"*":{action_:["output","space"]}},"{[(|)]}":{"0|a":{
action_:"copy"}},"(-)(9)^(-9)":{0:{action_:"number^",nextState:"a"}},"(-)(9.,9)(e)(99)":{0:{action_:"enumber",nextState:"a"}},space:{"0|a":{}},"pm-operator":{"0\
|a":{action_:{type_:"operator",option:"\\pm"},nextState:"0"}},operator:{"0|a":{action_:"copy",nextState:"0"}},"//":{d:{action_:"o=",nextState:"/"}},"/":{d:{action_:"\
o=",nextState:"/"}},"{...}|else":{"0|d":{action_:"d=",nextState:"d"},a:{action_:["space","d="],nextState:"d"},"/|q":{action_:"q=",nextState:"q"}}}),actions:{enumber:function(e,t){
var n=[];return t[0]==="+-"||t[0]==="+/-"?n.push("\\pm "):t[0]&&n.push(t[0]),t[1]&&(L.concatArray(n,L.go(t[1],"pu-9,9")),t[2]&&(t[2].match(/[,.]/)?L.concatArray(
n,L.go(t[2],"pu-9,9")):n.push(t[2])),t[3]=t[4]||t[3],t[3]&&(t[3]=t[3].trim(),t[3]==="e"||t[3].substr(0,1)==="*"?n.push({type_:"cdot"}):n.push({type_:"times"}))),
t[3]&&n.push("10^{"+t[5]+"}"),n},"number^":function(e,t){var n=[];return t[0]==="+-"||t[0]==="+/-"?n.push("\\pm "):t[0]&&n.push(t[0]),L.concatArray(n,L.go(t[1],
"pu-9,9")),n.push("^{"+t[2]+"}"),n},operator:function(e,t,n){return{type_:"operator",kind_:n||t}},space:function(){return{type_:"pu-space-1"}},output:function(e){
var t,n=L.patterns.match_("{(...)}",e.d||"");n&&n.remainder===""&&(e.d=n.match_);var r=L.patterns.match_("{(...)}",e.q||"");if(r&&r.remainder===""&&(e.q=r.match_),
e.d&&(e.d=e.d.replace(/\u00B0C|\^oC|\^{o}C/g,"{}^{\\circ}C"),e.d=e.d.replace(/\u00B0F|\^oF|\^{o}F/g,"{}^{\\circ}F")),e.q){e.q=e.q.replace(/\u00B0C|\^oC|\^{o}C/g,
"{}^{\\circ}C"),e.q=e.q.replace(/\u00B0F|\^oF|\^{o}F/g,"{}^{\\circ}F");var i={d:L.go(e.d,"pu"),q:L.go(e.q,"pu")};e.o==="//"?t={type_:"pu-frac",p1:i.d,p2:i.q}:(t=
i.d,i.d.length>1||i.q.length>1?t.push({type_:" / "}):t.push({type_:"/"}),L.concatArray(t,i.q))}else t=L.go(e.d,"pu-2");for(var o in e)delete e[o];return t}}},"p\
u-2":{transitions:L.createTransitions({empty:{"*":{action_:"output"}},"*":{"*":{action_:["output","cdot"],nextState:"0"}},"\\x":{"*":{action_:"rm="}},space:{"*":{
action_:["output","space"],nextState:"0"}},"^{(...)}|^(-1)":{1:{action_:"^(-1)"}},"-9.,9":{0:{action_:"rm=",nextState:"0"},1:{action_:"^(-1)",nextState:"0"}},"{\
...}|else":{"*":{action_:"rm=",nextState:"1"}}}),actions:{cdot:function(){return{type_:"tight cdot"}},"^(-1)":function(e,t){e.rm+="^{"+t+"}"},space:function(){return{
type_:"pu-space-2"}},output:function(e){var t=[];if(e.rm){var n=L.patterns.match_("{(...)}",e.rm||"");n&&n.remainder===""?t=L.go(n.match_,"pu"):t={type_:"rm",p1:e.
rm}}for(var r in e)delete e[r];return t}}},"pu-9,9":{transitions:L.createTransitions({empty:{0:{action_:"output-0"},o:{action_:"output-o"}},",":{0:{action_:["ou\
tput-0","comma"],nextState:"o"}},".":{0:{action_:["output-0","copy"],nextState:"o"}},else:{"*":{action_:"text="}}}),actions:{comma:function(){return{type_:"comm\
aDecimal"}},"output-0":function(e){var t=[];if(e.text_=e.text_||"",e.text_.length>4){var n=e.text_.length%3;n===0&&(n=3);for(var r=e.text_.length-3;r>0;r-=3)t.push(
e.text_.substr(r,3)),t.push({type_:"1000 separator"});t.push(e.text_.substr(0,n)),t.reverse()}else t.push(e.text_);for(var i in e)delete e[i];return t},"output-\
o":function(e){var t=[];if(e.text_=e.text_||"",e.text_.length>4){for(var n=e.text_.length-3,r=0;r<n;r+=3)t.push(e.text_.substr(r,3)),t.push({type_:"1000 separat\
or"});t.push(e.text_.substr(r))}else t.push(e.text_);for(var i in e)delete e[i];return t}}}};var xe={go:function(e,t){if(!e)return"";for(var n="",r=!1,i=0;i<e.length;i++){
var o=e[i];typeof o=="string"?n+=o:(n+=xe._go2(o),o.type_==="1st-level escape"&&(r=!0))}return!t&&!r&&n&&(n="{"+n+"}"),n},_goInner:function(e){return e&&xe.go(e,
!0)},_go2:function(e){var t;switch(e.type_){case"chemfive":t="";var n={a:xe._goInner(e.a),b:xe._goInner(e.b),p:xe._goInner(e.p),o:xe._goInner(e.o),q:xe._goInner(
e.q),d:xe._goInner(e.d)};n.a&&(n.a.match(/^[+\-]/)&&(n.a="{"+n.a+"}"),t+=n.a+"\\,"),(n.b||n.p)&&(t+="{\\vphantom{X}}",t+="^{\\hphantom{"+(n.b||"")+"}}_{\\hphanto\
m{"+(n.p||"")+"}}",t+="{\\vphantom{X}}",t+="^{\\vphantom{2}\\mathllap{"+(n.b||"")+"}}",t+="_{\\vphantom{2}\\mathllap{"+(n.p||"")+"}}"),n.o&&(n.o.match(/^[+\-]/)&&
(n.o="{"+n.o+"}"),t+=n.o),e.dType==="kv"?((n.d||n.q)&&(t+="{\\vphantom{X}}"),n.d&&(t+="^{"+n.d+"}"),n.q&&(t+="_{"+n.q+"}")):e.dType==="oxidation"?(n.d&&(t+="{\\v\
phantom{X}}",t+="^{"+n.d+"}"),n.q&&(t+="{{}}",t+="_{"+n.q+"}")):(n.q&&(t+="{{}}",t+="_{"+n.q+"}"),n.d&&(t+="{{}}",t+="^{"+n.d+"}"));break;case"rm":t="\\mathrm{"+
e.p1+"}";break;case"text":e.p1.match(/[\^_]/)?(e.p1=e.p1.replace(" ","~").replace("-","\\text{-}"),t="\\mathrm{"+e.p1+"}"):t="\\text{"+e.p1+"}";break;case"roman\
 numeral":t="\\mathrm{"+e.p1+"}";break;case"state of aggregation":t="\\mskip2mu "+xe._goInner(e.p1);break;case"state of aggregation subscript":t="\\mskip1mu "+xe.
_goInner(e.p1);break;case"bond":if(t=xe._getBond(e.kind_),!t)throw["MhchemErrorBond","mhchem Error. Unknown bond type ("+e.kind_+")"];break;case"frac":var r="\\f\
rac{"+e.p1+"}{"+e.p2+"}";t="\\mathchoice{\\textstyle"+r+"}{"+r+"}{"+r+"}{"+r+"}";break;case"pu-frac":var i="\\frac{"+xe._goInner(e.p1)+"}{"+xe._goInner(e.p2)+"}";
t="\\mathchoice{\\textstyle"+i+"}{"+i+"}{"+i+"}{"+i+"}";break;case"tex-math":t=e.p1+" ";break;case"frac-ce":t="\\frac{"+xe._goInner(e.p1)+"}{"+xe._goInner(e.p2)+
"}";break;case"overset":t="\\overset{"+xe._goInner(e.p1)+"}{"+xe._goInner(e.p2)+"}";break;case"underset":t="\\underset{"+xe._goInner(e.p1)+"}{"+xe._goInner(e.p2)+
"}";break;case"underbrace":t="\\underbrace{"+xe._goInner(e.p1)+"}_{"+xe._goInner(e.p2)+"}";break;case"color":t="{\\color{"+e.color1+"}{"+xe._goInner(e.color2)+"\
}}";break;case"color0":t="\\color{"+e.color+"}";break;case"arrow":var o={rd:xe._goInner(e.rd),rq:xe._goInner(e.rq)},a=xe._getArrow(e.r);o.rq&&(a+="[{\\rm "+o.rq+
"}]"),o.rd?a+="{\\rm "+o.rd+"}":a+="{}",t=a;break;case"operator":t=xe._getOperator(e.kind_);break;case"1st-level escape":t=e.p1+" ";break;case"space":t=" ";break;case"\
entitySkip":t="~";break;case"pu-space-1":t="~";break;case"pu-space-2":t="\\mkern3mu ";break;case"1000 separator":t="\\mkern2mu ";break;case"commaDecimal":t="{,}";
break;case"comma enumeration L":t="{"+e.p1+"}\\mkern6mu ";break;case"comma enumeration M":t="{"+e.p1+"}\\mkern3mu ";break;case"comma enumeration S":t="{"+e.p1+"\
}\\mkern1mu ";break;case"hyphen":t="\\text{-}";break;case"addition compound":t="\\,{\\cdot}\\,";break;case"electron dot":t="\\mkern1mu \\text{\\textbullet}\\mkern1m\
u ";break;case"KV x":t="{\\times}";break;case"prime":t="\\prime ";break;case"cdot":t="\\cdot ";break;case"tight cdot":t="\\mkern1mu{\\cdot}\\mkern1mu ";break;case"\
times":t="\\times ";break;case"circa":t="{\\sim}";break;case"^":t="uparrow";break;case"v":t="downarrow";break;case"ellipsis":t="\\ldots ";break;case"/":t="/";break;case"\
 / ":t="\\,/\\,";break;default:throw["MhchemBugT","mhchem bug T. Please report."]}return t},_getArrow:function(e){switch(e){case"->":return"\\yields";case"\u2192":
return"\\yields";case"\u27F6":return"\\yields";case"<-":return"\\yieldsLeft";case"<->":return"\\mesomerism";case"<-->":return"\\yieldsLeftRight";case"<=>":return"\
\\chemequilibrium";case"\u21CC":return"\\chemequilibrium";case"<=>>":return"\\equilibriumRight";case"<<=>":return"\\equilibriumLeft";default:throw["MhchemBugT",
"mhchem bug T. Please report."]}},_getBond:function(e){switch(e){case"-":return"{-}";case"1":return"{-}";case"=":return"{=}";case"2":return"{=}";case"#":return"\
{\\equiv}";case"3":return"{\\equiv}";case"~":return"{\\tripleDash}";case"~-":return"{\\tripleDashOverLine}";case"~=":return"{\\tripleDashOverDoubleLine}";case"~\
--":return"{\\tripleDashOverDoubleLine}";case"-~-":return"{\\tripleDashBetweenDoubleLine}";case"...":return"{{\\cdot}{\\cdot}{\\cdot}}";case"....":return"{{\\cdo\
t}{\\cdot}{\\cdot}{\\cdot}}";case"->":return"{\\rightarrow}";case"<-":return"{\\leftarrow}";case"<":return"{<}";case">":return"{>}";default:throw["MhchemBugT","\
mhchem bug T. Please report."]}},_getOperator:function(e){switch(e){case"+":return" {}+{} ";case"-":return" {}-{} ";case"=":return" {}={} ";case"<":return" {}<{\
} ";case">":return" {}>{} ";case"<<":return" {}\\ll{} ";case">>":return" {}\\gg{} ";case"\\pm":return" {}\\pm{} ";case"\\approx":return" {}\\approx{} ";case"$\\a\
pprox$":return" {}\\approx{} ";case"v":return" \\downarrow{} ";case"(v)":return" \\downarrow{} ";case"^":return" \\uparrow{} ";case"(^)":return" \\uparrow{} ";default:
throw["MhchemBugT","mhchem bug T. Please report."]}}};g("\\darr","\\downarrow");g("\\dArr","\\Downarrow");g("\\Darr","\\Downarrow");g("\\lang","\\langle");g("\\rang","\\rangle");g("\\uarr","\\uparrow");g("\\uArr","\
\\Uparrow");g("\\Uarr","\\Uparrow");g("\\N","\\mathbb{N}");g("\\R","\\mathbb{R}");g("\\Z","\\mathbb{Z}");g("\\alef","\\aleph");g("\\alefsym","\\aleph");g("\\bull",
"\\bullet");g("\\clubs","\\clubsuit");g("\\cnums","\\mathbb{C}");g("\\Complex","\\mathbb{C}");g("\\Dagger","\\ddagger");g("\\diamonds","\\diamondsuit");g("\\empt\
y","\\emptyset");g("\\exist","\\exists");g("\\harr","\\leftrightarrow");g("\\hArr","\\Leftrightarrow");g("\\Harr","\\Leftrightarrow");g("\\hearts","\\heartsuit");
g("\\image","\\Im");g("\\infin","\\infty");g("\\isin","\\in");g("\\larr","\\leftarrow");g("\\lArr","\\Leftarrow");g("\\Larr","\\Leftarrow");g("\\lrarr","\\leftri\
ghtarrow");g("\\lrArr","\\Leftrightarrow");g("\\Lrarr","\\Leftrightarrow");g("\\natnums","\\mathbb{N}");g("\\plusmn","\\pm");g("\\rarr","\\rightarrow");g("\\rArr",
"\\Rightarrow");g("\\Rarr","\\Rightarrow");g("\\real","\\Re");g("\\reals","\\mathbb{R}");g("\\Reals","\\mathbb{R}");g("\\sdot","\\cdot");g("\\sect","\\S");g("\\s\
pades","\\spadesuit");g("\\sub","\\subset");g("\\sube","\\subseteq");g("\\supe","\\supseteq");g("\\thetasym","\\vartheta");g("\\weierp","\\wp");g("\\quantity","\
{\\left\\{ #1 \\right\\}}");g("\\qty","{\\left\\{ #1 \\right\\}}");g("\\pqty","{\\left( #1 \\right)}");g("\\bqty","{\\left[ #1 \\right]}");g("\\vqty","{\\left\\ve\
rt #1 \\right\\vert}");g("\\Bqty","{\\left\\{ #1 \\right\\}}");g("\\absolutevalue","{\\left\\vert #1 \\right\\vert}");g("\\abs","{\\left\\vert #1 \\right\\vert}");
g("\\norm","{\\left\\Vert #1 \\right\\Vert}");g("\\evaluated","{\\left.#1 \\right\\vert}");g("\\eval","{\\left.#1 \\right\\vert}");g("\\order","{\\mathcal{O} \\le\
ft( #1 \\right)}");g("\\commutator","{\\left[ #1 , #2 \\right]}");g("\\comm","{\\left[ #1 , #2 \\right]}");g("\\anticommutator","{\\left\\{ #1 , #2 \\right\\}}");
g("\\acomm","{\\left\\{ #1 , #2 \\right\\}}");g("\\poissonbracket","{\\left\\{ #1 , #2 \\right\\}}");g("\\pb","{\\left\\{ #1 , #2 \\right\\}}");g("\\vectorbold",
"{\\boldsymbol{ #1 }}");g("\\vb","{\\boldsymbol{ #1 }}");g("\\vectorarrow","{\\vec{\\boldsymbol{ #1 }}}");g("\\va","{\\vec{\\boldsymbol{ #1 }}}");g("\\vectorunit",
"{{\\boldsymbol{\\hat{ #1 }}}}");g("\\vu","{{\\boldsymbol{\\hat{ #1 }}}}");g("\\dotproduct","\\mathbin{\\boldsymbol\\cdot}");g("\\vdot","{\\boldsymbol\\cdot}");
g("\\crossproduct","\\mathbin{\\boldsymbol\\times}");g("\\cross","\\mathbin{\\boldsymbol\\times}");g("\\cp","\\mathbin{\\boldsymbol\\times}");g("\\gradient","{\\\
boldsymbol\\nabla}");g("\\grad","{\\boldsymbol\\nabla}");g("\\divergence","{\\grad\\vdot}");g("\\curl","{\\grad\\cross}");g("\\laplacian","\\nabla^2");g("\\tr",
"{\\operatorname{tr}}");g("\\Tr","{\\operatorname{Tr}}");g("\\rank","{\\operatorname{rank}}");g("\\erf","{\\operatorname{erf}}");g("\\Res","{\\operatorname{Res}}");
g("\\principalvalue","{\\mathcal{P}}");g("\\pv","{\\mathcal{P}}");g("\\PV","{\\operatorname{P.V.}}");g("\\qqtext","{\\quad\\text{ #1 }\\quad}");g("\\qq","{\\quad\
\\text{ #1 }\\quad}");g("\\qcomma","{\\text{,}\\quad}");g("\\qc","{\\text{,}\\quad}");g("\\qcc","{\\quad\\text{c.c.}\\quad}");g("\\qif","{\\quad\\text{if}\\quad}");
g("\\qthen","{\\quad\\text{then}\\quad}");g("\\qelse","{\\quad\\text{else}\\quad}");g("\\qotherwise","{\\quad\\text{otherwise}\\quad}");g("\\qunless","{\\quad\\te\
xt{unless}\\quad}");g("\\qgiven","{\\quad\\text{given}\\quad}");g("\\qusing","{\\quad\\text{using}\\quad}");g("\\qassume","{\\quad\\text{assume}\\quad}");g("\\qs\
ince","{\\quad\\text{since}\\quad}");g("\\qlet","{\\quad\\text{let}\\quad}");g("\\qfor","{\\quad\\text{for}\\quad}");g("\\qall","{\\quad\\text{all}\\quad}");g("\
\\qeven","{\\quad\\text{even}\\quad}");g("\\qodd","{\\quad\\text{odd}\\quad}");g("\\qinteger","{\\quad\\text{integer}\\quad}");g("\\qand","{\\quad\\text{and}\\quad\
}");g("\\qor","{\\quad\\text{or}\\quad}");g("\\qas","{\\quad\\text{as}\\quad}");g("\\qin","{\\quad\\text{in}\\quad}");g("\\differential","{\\text{d}}");g("\\dd",
"{\\text{d}}");g("\\derivative","{\\frac{\\text{d}{ #1 }}{\\text{d}{ #2 }}}");g("\\dv","{\\frac{\\text{d}{ #1 }}{\\text{d}{ #2 }}}");g("\\partialderivative","{\\\
frac{\\partial{ #1 }}{\\partial{ #2 }}}");g("\\variation","{\\delta}");g("\\var","{\\delta}");g("\\functionalderivative","{\\frac{\\delta{ #1 }}{\\delta{ #2 }}}");
g("\\fdv","{\\frac{\\delta{ #1 }}{\\delta{ #2 }}}");g("\\innerproduct","{\\left\\langle {#1} \\mid { #2} \\right\\rangle}");g("\\outerproduct","{\\left\\vert { #1\
 } \\right\\rangle\\left\\langle { #2} \\right\\vert}");g("\\dyad","{\\left\\vert { #1 } \\right\\rangle\\left\\langle { #2} \\right\\vert}");g("\\ketbra","{\\le\
ft\\vert { #1 } \\right\\rangle\\left\\langle { #2} \\right\\vert}");g("\\op","{\\left\\vert { #1 } \\right\\rangle\\left\\langle { #2} \\right\\vert}");g("\\exp\
ectationvalue","{\\left\\langle {#1 } \\right\\rangle}");g("\\expval","{\\left\\langle {#1 } \\right\\rangle}");g("\\ev","{\\left\\langle {#1 } \\right\\rangle}");
g("\\matrixelement","{\\left\\langle{ #1 }\\right\\vert{ #2 }\\left\\vert{#3}\\right\\rangle}");g("\\matrixel","{\\left\\langle{ #1 }\\right\\vert{ #2 }\\left\\vert{#\
3}\\right\\rangle}");g("\\mel","{\\left\\langle{ #1 }\\right\\vert{ #2 }\\left\\vert{#3}\\right\\rangle}");function Ss(e){let t=[];e.consumeSpaces();let n=e.fetch().
text;for(n==="\\relax"&&(e.consume(),e.consumeSpaces(),n=e.fetch().text);n==="\\hline"||n==="\\hdashline";)e.consume(),t.push(n==="\\hdashline"),e.consumeSpaces(),
n=e.fetch().text;return t}var yn=e=>{if(!e.parser.settings.displayMode)throw new B(`{${e.envName}} can be used only in display mode.`)},Lm=/([-+]?) *(\d+(?:\.\d*)?|\.\d+) *([a-z]{2})/,
rl=e=>{let t=e.get("\\arraystretch");typeof t!="string"&&(t=xi(t.tokens)),t=isNaN(t)?null:Number(t);let n=e.get("\\arraycolsep");typeof n!="string"&&(n=xi(n.tokens));
let r=Lm.exec(n),i=r?{number:+(r[1]+r[2]),unit:r[3]}:null;return[t,i]},vs=e=>{let t="";for(let n=0;n<e.length;n++)if(e[n].type==="label"){if(t)throw new B("Mult\
iple \\labels in one row");t=e[n].string}return t};function Di(e){if(e.indexOf("ed")===-1)return e.indexOf("*")===-1}function at(e,{cols:t,envClasses:n,autoTag:r,
singleRow:i,emptySingleRow:o,maxNumCols:a,leqno:l,arraystretch:u,arraycolsep:d},p){let m=n&&n.includes("bordermatrix")?"}":"\\end";e.gullet.beginGroup(),i||e.gullet.
macros.set("\\cr","\\\\\\relax"),e.gullet.beginGroup();let h=[],f=[h],_=[],C=[],T=[],E=r!=null?[]:void 0;function v(){r&&e.gullet.macros.set("\\@eqnsw","1",!0)}
function D(){E&&(e.gullet.macros.get("\\df@tag")?(E.push(e.subparse([new Ge("\\df@tag")])),e.gullet.macros.set("\\df@tag",void 0,!0)):E.push(!!r&&e.gullet.macros.
get("\\@eqnsw")==="1"))}for(v(),T.push(Ss(e));;){let q=e.parseExpression(!1,i?"\\end":"\\\\");e.gullet.endGroup(),e.gullet.beginGroup(),q={type:"ordgroup",mode:e.
mode,body:q,semisimple:!0},h.push(q);let z=e.fetch().text;if(z==="&"){if(a&&h.length===a)if(n.includes("array")){if(e.settings.strict)throw new B("Too few colum\
ns specified in the {array} column argument.",e.nextToken)}else throw a===2?new B("The split environment accepts no more than two columns",e.nextToken):new B("T\
he equation environment accepts only one column",e.nextToken);e.consume()}else if(z===m){D(),h.length===1&&q.body.length===0&&(f.length>1||!o)&&f.pop(),C.push(vs(
q.body)),T.length<f.length+1&&T.push([]);break}else if(z==="\\\\"){e.consume();let A;e.gullet.future().text!==" "&&(A=e.parseSizeGroup(!0)),_.push(A?A.value:null),
D(),C.push(vs(q.body)),T.push(Ss(e)),h=[],f.push(h),v()}else throw new B("Expected & or \\\\ or \\cr or "+m,e.nextToken)}return e.gullet.endGroup(),e.gullet.endGroup(),
{type:"array",mode:e.mode,body:f,cols:t,rowGaps:_,hLinesBeforeRow:T,envClasses:n,autoTag:r,scriptLevel:p,tags:E,labels:C,leqno:l,arraystretch:u,arraycolsep:d}}function il(e){
return e.slice(0,1)==="d"?"display":"text"}var Bm={c:"center ",l:"left ",r:"right "},As=e=>{let t=new S("mtd",[]);return t.style={padding:"0",width:"50%"},e.envClasses.
includes("multline")&&(t.style.width="7.5%"),t},We=function(e,t){let n=[],r=e.body.length,i=e.hLinesBeforeRow,o=e.tags&&e.tags.some(d=>d);for(let d=0;d<r;d++){let p=e.
body[d],m=[],h=e.scriptLevel==="text"?we.TEXT:e.scriptLevel==="script"?we.SCRIPT:we.DISPLAY;for(let E=0;E<p.length;E++){let v=new S("mtd",[pe(p[E],t.withLevel(h))]);
if(e.envClasses.includes("multline")){let D=d===0?"left":d===r-1?"right":"center";D!=="center"&&v.classes.push("tml-"+D)}m.push(v)}let f=e.body[0].length;for(let E=0;E<
f-p.length;E++)m.push(new S("mtd",[],[],t));if(o){let E=e.tags[d],v;E===!0?v=new S("mtext",[new tr(["tml-eqn"])]):E===!1?v=new S("mtext",[],[]):(v=yt(E[0].body,
t.withLevel(h),!0),v=lr(v),v.classes=["tml-tag"]),v&&(m.unshift(As(e)),m.push(As(e)),e.leqno?m[0].children.push(v):m[m.length-1].children.push(v))}let _=new S("\
mtr",m,[]),C=e.labels.shift();C&&e.tags&&e.tags[d]&&(_.setAttribute("id",C),Array.isArray(e.tags[d])&&_.classes.push("tml-tageqn")),d===0&&i[0].length>0&&(i[0].
length===2?_.children.forEach(E=>{E.style.borderTop="0.15em double"}):_.children.forEach(E=>{E.style.borderTop=i[0][0]?"0.06em dashed":"0.06em solid"})),i[d+1].
length>0&&(i[d+1].length===2?_.children.forEach(E=>{E.style.borderBottom="0.15em double"}):_.children.forEach(E=>{E.style.borderBottom=i[d+1][0]?"0.06em dashed":
"0.06em solid"}));let T=!0;for(let E=0;E<_.children.length;E++){let v=_.children[E].children[0];if(!(v&&v.type==="mpadded"&&v.attributes.height==="0px")){T=!1;break}}
if(T){_.classes.push("ff-squash");for(let E=0;E<_.children.length;E++)_.children[E].style.paddingTop="0",_.children[E].style.paddingBottom="0"}n.push(_)}if(e.arraystretch&&
e.arraystretch!==1){let d=String(1.4*e.arraystretch-.8)+"ex";for(let p=0;p<n.length;p++)for(let m=0;m<n[p].children.length;m++)n[p].children[m].style.paddingTop=
d,n[p].children[m].style.paddingBottom=d}let a,l;if(e.envClasses.length>0&&(a=e.envClasses.includes("abut")||e.envClasses.includes("cases")?"0":e.envClasses.includes(
"small")?"0.1389":e.envClasses.includes("cd")?"0.25":"0.4",l="em"),e.arraycolsep){let d=it(e.arraycolsep,t);a=d.number.toFixed(4),l=d.unit}if(a){let d=n.length===
0?0:n[0].children.length,p=(m,h)=>m===0&&h===0||m===d-1&&h===1?"0":e.envClasses[0]!=="align"?a:h===1?"0":o?m%2?"1":"0":m%2?"0":"1";for(let m=0;m<n.length;m++)for(let h=0;h<
n[m].children.length;h++)n[m].children[h].style.paddingLeft=`${p(h,0)}${l}`,n[m].children[h].style.paddingRight=`${p(h,1)}${l}`}if(e.envClasses.length===0)for(let d=0;d<
n.length;d++)n[d].children[0].style.paddingLeft="0em",n[d].children.length===n[0].children.length&&(n[d].children[n[d].children.length-1].style.paddingRight="0e\
m");if(e.envClasses.length>0){let d=e.envClasses.includes("align")||e.envClasses.includes("alignat");for(let p=0;p<n.length;p++){let m=n[p];if(d){for(let h=0;h<
m.children.length;h++)m.children[h].classes=["tml-"+(h%2?"left":"right")];if(o){let h=e.leqno?0:m.children.length-1;m.children[h].classes=[]}}if(m.children.length>
1&&e.envClasses.includes("cases")&&(m.children[1].style.paddingLeft="1em"),e.envClasses.includes("cases")||e.envClasses.includes("subarray"))for(let h of m.children)
h.classes.push("tml-left")}}let u=new S("mtable",n);if(e.envClasses.length>0&&(e.envClasses.includes("jot")?u.classes.push("tml-jot"):e.envClasses.includes("sma\
ll")&&u.classes.push("tml-small")),e.scriptLevel==="display"&&u.setAttribute("displaystyle","true"),(e.autoTag||e.envClasses.includes("multline"))&&(u.style.width=
"100%"),e.cols&&e.cols.length>0){let d=e.cols,p=!1,m=0,h=d.length;for(;d[m].type==="separator";)m+=1;for(;d[h-1].type==="separator";)h-=1;if(d[0].type==="separa\
tor"){let _=d[1].type==="separator"?"0.15em double":d[0].separator==="|"?"0.06em solid ":"0.06em dashed ";for(let C of u.children)C.children[0].style.borderLeft=
_}let f=o?0:-1;for(let _=m;_<h;_++)if(d[_].type==="align"){let C=Bm[d[_].align];f+=1;for(let T of u.children)C.trim()!=="center"&&f<T.children.length&&(T.children[f].
classes=["tml-"+C.trim()]);p=!0}else if(d[_].type==="separator"){if(p){let C=d[_+1].type==="separator"?"0.15em double":d[_].separator==="|"?"0.06em solid":"0.06\
em dashed";for(let T of u.children)f<T.children.length&&(T.children[f].style.borderRight=C)}p=!1}if(d[d.length-1].type==="separator"){let _=d[d.length-2].type===
"separator"?"0.15em double":d[d.length-1].separator==="|"?"0.06em solid":"0.06em dashed";for(let C of u.children)C.children[C.children.length-1].style.borderRight=
_,C.children[C.children.length-1].style.paddingRight="0.4em"}}return e.envClasses.includes("small")&&(u=new S("mstyle",[u]),u.setAttribute("scriptlevel","1")),u},
al=function(e,t){e.envName.indexOf("ed")===-1&&yn(e);let n=e.envName==="split",r=[],i=at(e.parser,{cols:r,emptySingleRow:!0,autoTag:n?void 0:Di(e.envName),envClasses:[
"abut","jot"],maxNumCols:e.envName==="split"?2:void 0,leqno:e.parser.settings.leqno},"display"),o,a=0,l=e.envName.indexOf("at")>-1;if(t[0]&&l){let u="";for(let d=0;d<
t[0].body.length;d++){let p=ae(t[0].body[d],"textord");u+=p.text}if(isNaN(u))throw new B("The alignat enviroment requires a numeric first argument.");o=Number(u),
a=o*2}i.body.forEach(function(u){if(l){let d=u.length/2;if(o<d)throw new B(`Too many math in a row: expected ${o}, but got ${d}`,u[0])}else a<u.length&&(a=u.length)});
for(let u=0;u<a;++u){let d="r";u%2===1&&(d="l"),r[u]={type:"align",align:d}}return e.envName==="split"||(l?i.envClasses.push("alignat"):i.envClasses[0]="align"),
i};Ke({type:"array",names:["array","darray"],props:{numArgs:1},handler(e,t){let i=(cr(t[0])?[t[0]]:ae(t[0],"ordgroup").body).map(function(u){let p=Ci(u).text;if("\
lcr".indexOf(p)!==-1)return{type:"align",align:p};if(p==="|")return{type:"separator",separator:"|"};if(p===":")return{type:"separator",separator:":"};throw new B(
"Unknown column alignment: "+p,u)}),[o,a]=rl(e.parser.gullet.macros),l={cols:i,envClasses:["array"],maxNumCols:i.length,arraystretch:o,arraycolsep:a};return at(
e.parser,l,il(e.envName))},mathmlBuilder:We});Ke({type:"array",names:["matrix","pmatrix","bmatrix","Bmatrix","vmatrix","Vmatrix","matrix*","pmatrix*","bmatrix*",
"Bmatrix*","vmatrix*","Vmatrix*"],props:{numArgs:0},handler(e){let t={matrix:null,pmatrix:["(",")"],bmatrix:["[","]"],Bmatrix:["\\{","\\}"],vmatrix:["|","|"],Vmatrix:[
"\\Vert","\\Vert"]}[e.envName.replace("*","")],n="c",r={envClasses:[],cols:[]};if(e.envName.charAt(e.envName.length-1)==="*"){let l=e.parser;if(l.consumeSpaces(),
l.fetch().text==="["){if(l.consume(),l.consumeSpaces(),n=l.fetch().text,"lcr".indexOf(n)===-1)throw new B("Expected l or c or r",l.nextToken);l.consume(),l.consumeSpaces(),
l.expect("]"),l.consume(),r.cols=[]}}let i=at(e.parser,r,"text");i.cols=i.body.length>0?new Array(i.body[0].length).fill({type:"align",align:n}):[];let[o,a]=rl(
e.parser.gullet.macros);return i.arraystretch=o,a&&!(a===6&&a==="pt")&&(i.arraycolsep=a),t?{type:"leftright",mode:e.mode,body:[i],left:t[0],right:t[1],rightColor:void 0}:
i},mathmlBuilder:We});Ke({type:"array",names:["bordermatrix"],props:{numArgs:0},handler(e){let t={cols:[],envClasses:["bordermatrix"]},n=at(e.parser,t,"text");return n.
cols=n.body.length>0?new Array(n.body[0].length).fill({type:"align",align:"c"}):[],n.envClasses=[],n.arraystretch=1,e.envName==="matrix"?n:Dm(n,e.delimiters)},mathmlBuilder:We});
Ke({type:"array",names:["smallmatrix"],props:{numArgs:0},handler(e){let t={envClasses:["small"]};return at(e.parser,t,"script")},mathmlBuilder:We});Ke({type:"ar\
ray",names:["subarray"],props:{numArgs:1},handler(e,t){let i=(cr(t[0])?[t[0]]:ae(t[0],"ordgroup").body).map(function(a){let u=Ci(a).text;if("lc".indexOf(u)!==-1)
return{type:"align",align:u};throw new B("Unknown column alignment: "+u,a)});if(i.length>1)throw new B("{subarray} can contain only one column");let o={cols:i,envClasses:[
"small"]};if(o=at(e.parser,o,"script"),o.body.length>0&&o.body[0].length>1)throw new B("{subarray} can contain only one column");return o},mathmlBuilder:We});Ke(
{type:"array",names:["cases","dcases","rcases","drcases"],props:{numArgs:0},handler(e){let t={cols:[],envClasses:["cases"]},n=at(e.parser,t,il(e.envName));return{
type:"leftright",mode:e.mode,body:[n],left:e.envName.indexOf("r")>-1?".":"\\{",right:e.envName.indexOf("r")>-1?"\\}":".",rightColor:void 0}},mathmlBuilder:We});
Ke({type:"array",names:["align","align*","aligned","split"],props:{numArgs:0},handler:al,mathmlBuilder:We});Ke({type:"array",names:["alignat","alignat*","aligne\
dat"],props:{numArgs:1},handler:al,mathmlBuilder:We});Ke({type:"array",names:["gathered","gather","gather*"],props:{numArgs:0},handler(e){e.envName!=="gathered"&&
yn(e);let t={cols:[],envClasses:["abut","jot"],autoTag:Di(e.envName),emptySingleRow:!0,leqno:e.parser.settings.leqno};return at(e.parser,t,"display")},mathmlBuilder:We});
Ke({type:"array",names:["equation","equation*"],props:{numArgs:0},handler(e){yn(e);let t={autoTag:Di(e.envName),emptySingleRow:!0,singleRow:!0,maxNumCols:1,envClasses:[
"align"],leqno:e.parser.settings.leqno};return at(e.parser,t,"display")},mathmlBuilder:We});Ke({type:"array",names:["multline","multline*"],props:{numArgs:0},handler(e){
yn(e);let t={autoTag:e.envName==="multline",maxNumCols:1,envClasses:["jot","multline"],leqno:e.parser.settings.leqno};return at(e.parser,t,"display")},mathmlBuilder:We});
Ke({type:"array",names:["CD"],props:{numArgs:0},handler(e){return yn(e),Rm(e.parser)},mathmlBuilder:We});U({type:"text",names:["\\hline","\\hdashline"],props:{numArgs:0,
allowedInText:!0,allowedInMath:!0},handler(e,t){throw new B(`${e.funcName} valid only within array environment`)}});var yi=Qs;U({type:"bordermatrix",names:["\\bo\
rdermatrix","\\matrix"],props:{numArgs:0,numOptionalArgs:1},handler:({parser:e,funcName:t},n,r)=>{let i=["(",")"];if(t==="\\bordermatrix"&&r[0]&&r[0].body){let u=r[0].
body;u.length===1&&u[0].type==="delimiter"&&(i=[u[0].left,u[0].right])}e.consumeSpaces(),e.consume();let o=yi.bordermatrix,a={mode:e.mode,envName:t.slice(1),delimiters:i,
parser:e},l=o.handler(a);return e.expect("}",!0),l}});U({type:"cancelto",names:["\\cancelto"],props:{numArgs:2},handler({parser:e},t){let n=t[0],r=t[1];return{type:"\
cancelto",mode:e.mode,body:r,to:n,isCharacterBox:sr(r)}},mathmlBuilder(e,t){let n=new S("mrow",[pe(e.body,t)],["ff-narrow"]),r=new S("mphantom",[pe(e.body,t)]),
i=new S("mrow",[r],["tml-cancelto"]);i.style.color=t.color,e.isCharacterBox&&Ks.indexOf(e.body.body[0].text)>-1&&(i.style.left="0.1em",i.style.width="90%");let o=new S(
"mrow",[n,i],["menclose"]);if(!e.isCharacterBox||/[f∫∑]/.test(e.body.body[0].text))r.style.paddingRight="0.2em";else{r.style.padding="0.5ex 0.1em 0 0";let m=new S(
"mspace",[]);m.setAttribute("height","0.85em"),n.children.push(m)}let a;if(e.isCharacterBox)a=new S("mspace",[]),a.setAttribute("height","1em");else{let m=pe(e.
body,t),h=new S("mpadded",[m]);h.setAttribute("width","0.1px"),a=new S("mphantom",[h])}let l=pe(e.to,t);l.style.color=t.color;let u=new S("mpadded",[l]);if(!e.isCharacterBox||
/[f∫∑]/.test(e.body.body[0].text)){let m=new S("mspace",[]);m.setAttribute("width","0.2em"),u.children.unshift(m)}u.setAttribute("width","0.1px");let d=new S(
"mover",[a,u]),p=new S("mrow",[],["ff-nudge-left"]);return Ct([xn([o,d]),p])}});U({type:"textord",names:["\\@char"],props:{numArgs:1,allowedInText:!0},handler({
parser:e,token:t},n){let i=ae(n[0],"ordgroup").body,o="";for(let l=0;l<i.length;l++){let u=ae(i[l],"textord");o+=u.text}let a=parseInt(o);if(isNaN(a))throw new B(
`\\@char has non-numeric argument ${o}`,t);return{type:"textord",mode:e.mode,text:String.fromCodePoint(a)}}});var qm=/^(#[a-f0-9]{3}|#?[a-f0-9]{6})$/i,Fm=/^(#[a-f0-9]{3}|#?[a-f0-9]{6}|[a-z]+)$/i,
Pm=/^ *\d{1,3} *(?:, *\d{1,3} *){2}$/,zm=/^ *[10](?:\.\d*)? *(?:, *[10](?:\.\d*)? *){2}$/,Um=/^[a-f0-9]{6}$/i,Ts=e=>{let t=e.toString(16);return t.length===1&&(t=
"0"+t),t},Ns=JSON.parse(`{
  "Apricot": "#ffb484",
  "Aquamarine": "#08b4bc",
  "Bittersweet": "#c84c14",
  "blue": "#0000FF",
  "Blue": "#303494",
  "BlueGreen": "#08b4bc",
  "BlueViolet": "#503c94",
  "BrickRed": "#b8341c",
  "brown": "#BF8040",
  "Brown": "#802404",
  "BurntOrange": "#f8941c",
  "CadetBlue": "#78749c",
  "CarnationPink": "#f884b4",
  "Cerulean": "#08a4e4",
  "CornflowerBlue": "#40ace4",
  "cyan": "#00FFFF",
  "Cyan": "#08acec",
  "Dandelion": "#ffbc44",
  "darkgray": "#404040",
  "DarkOrchid": "#a8548c",
  "Emerald": "#08ac9c",
  "ForestGreen": "#089c54",
  "Fuchsia": "#90348c",
  "Goldenrod": "#ffdc44",
  "gray": "#808080",
  "Gray": "#98949c",
  "green": "#00FF00",
  "Green": "#08a44c",
  "GreenYellow": "#e0e474",
  "JungleGreen": "#08ac9c",
  "Lavender": "#f89cc4",
  "lightgray": "#c0c0c0",
  "lime": "#BFFF00",
  "LimeGreen": "#90c43c",
  "magenta": "#FF00FF",
  "Magenta": "#f0048c",
  "Mahogany": "#b0341c",
  "Maroon": "#b03434",
  "Melon": "#f89c7c",
  "MidnightBlue": "#086494",
  "Mulberry": "#b03c94",
  "NavyBlue": "#086cbc",
  "olive": "#7F7F00",
  "OliveGreen": "#407c34",
  "orange": "#FF8000",
  "Orange": "#f8843c",
  "OrangeRed": "#f0145c",
  "Orchid": "#b074ac",
  "Peach": "#f8945c",
  "Periwinkle": "#8074bc",
  "PineGreen": "#088c74",
  "pink": "#ff7f7f",
  "Plum": "#98248c",
  "ProcessBlue": "#08b4ec",
  "purple": "#BF0040",
  "Purple": "#a0449c",
  "RawSienna": "#983c04",
  "red": "#ff0000",
  "Red": "#f01c24",
  "RedOrange": "#f86434",
  "RedViolet": "#a0246c",
  "Rhodamine": "#f0549c",
  "Royallue": "#0874bc",
  "RoyalPurple": "#683c9c",
  "RubineRed": "#f0047c",
  "Salmon": "#f8948c",
  "SeaGreen": "#30bc9c",
  "Sepia": "#701404",
  "SkyBlue": "#48c4dc",
  "SpringGreen": "#c8dc64",
  "Tan": "#e09c74",
  "teal": "#007F7F",
  "TealBlue": "#08acb4",
  "Thistle": "#d884b4",
  "Turquoise": "#08b4cc",
  "violet": "#800080",
  "Violet": "#60449c",
  "VioletRed": "#f054a4",
  "WildStrawberry": "#f0246c",
  "yellow": "#FFFF00",
  "Yellow": "#fff404",
  "YellowGreen": "#98cc6c",
  "YellowOrange": "#ffa41c"
}`),Vt=(e,t)=>{let n="";if(e==="HTML"){if(!qm.test(t))throw new B("Invalid HTML input.");n=t}else if(e==="RGB"){if(!Pm.test(t))throw new B("Invalid RGB input.");
t.split(",").map(r=>{n+=Ts(Number(r.trim()))})}else{if(!zm.test(t))throw new B("Invalid rbg input.");t.split(",").map(r=>{let i=Number(r.trim());if(i>1)throw new B(
"Color rgb input must be < 1.");n+=Ts(Number((i*255).toFixed(0)))})}return n.charAt(0)!=="#"&&(n="#"+n),n},hn=(e,t,n)=>{let r=`\\\\color@${e}`;if(!Fm.exec(e))throw new B(
"Invalid color: '"+e+"'",n);return Um.test(e)?"#"+e:(e.charAt(0)==="#"||(t.has(r)?e=t.get(r).tokens[0].text:Ns[e]&&(e=Ns[e])),e)},ol=(e,t)=>{let n=Be(e.body,t.withColor(
e.color));return n.length===0&&n.push(new S("mrow")),n=n.map(r=>(r.style.color=e.color,r)),Ct(n)};U({type:"color",names:["\\textcolor"],props:{numArgs:2,numOptionalArgs:1,
allowedInText:!0,argTypes:["raw","raw","original"]},handler({parser:e,token:t},n,r){let i=r[0]&&ae(r[0],"raw").string,o="";if(i){let l=ae(n[0],"raw").string;o=Vt(
i,l)}else o=hn(ae(n[0],"raw").string,e.gullet.macros,t);let a=n[1];return{type:"color",mode:e.mode,color:o,isTextColor:!0,body:Ie(a)}},mathmlBuilder:ol});U({type:"\
color",names:["\\color"],props:{numArgs:1,numOptionalArgs:1,allowedInText:!0,argTypes:["raw","raw"]},handler({parser:e,breakOnTokenText:t,token:n},r,i){let o=i[0]&&
ae(i[0],"raw").string,a="";if(o){let u=ae(r[0],"raw").string;a=Vt(o,u)}else a=hn(ae(r[0],"raw").string,e.gullet.macros,n);let l=e.parseExpression(!0,t,!0);return{
type:"color",mode:e.mode,color:a,isTextColor:!1,body:l}},mathmlBuilder:ol});U({type:"color",names:["\\definecolor"],props:{numArgs:3,allowedInText:!0,argTypes:[
"raw","raw","raw"]},handler({parser:e,funcName:t,token:n},r){let i=ae(r[0],"raw").string;if(!/^[A-Za-z]+$/.test(i))throw new B("Color name must be latin letters\
.",n);let o=ae(r[1],"raw").string;if(!["HTML","RGB","rgb"].includes(o))throw new B("Color model must be HTML, RGB, or rgb.",n);let a=ae(r[2],"raw").string,l=Vt(
o,a);return e.gullet.macros.set(`\\\\color@${i}`,{tokens:[{text:l}],numArgs:0}),{type:"internal",mode:e.mode}}});U({type:"cr",names:["\\\\"],props:{numArgs:0,numOptionalArgs:0,
allowedInText:!0},handler({parser:e},t,n){let r=e.gullet.future().text==="["?e.parseSizeGroup(!0):null,i=!e.settings.displayMode;return{type:"cr",mode:e.mode,newLine:i,
size:r&&ae(r,"size").value}},mathmlBuilder(e,t){let n=new S("mo");if(e.newLine&&(n.setAttribute("linebreak","newline"),e.size)){let r=it(e.size,t);n.setAttribute(
"height",r.number+r.unit)}return n}});var wi={"\\global":"\\global","\\long":"\\\\globallong","\\\\globallong":"\\\\globallong","\\def":"\\gdef","\\gdef":"\\gdef",
"\\edef":"\\xdef","\\xdef":"\\xdef","\\let":"\\\\globallet","\\futurelet":"\\\\globalfuture"},ir=e=>{let t=e.text;if(/^(?:[\\{}$&#^_]|EOF)$/.test(t))throw new B(
"Expected a control sequence",e);return t},$m=e=>{let t=e.gullet.popToken();return t.text==="="&&(t=e.gullet.popToken(),t.text===" "&&(t=e.gullet.popToken())),t},
sl=(e,t,n,r)=>{let i=e.gullet.macros.get(n.text);i==null&&(n.noexpand=!0,i={tokens:[n],numArgs:0,unexpandable:!e.gullet.isExpandable(n.text)}),e.gullet.macros.set(
t,i,r)};U({type:"internal",names:["\\global","\\long","\\\\globallong"],props:{numArgs:0,allowedInText:!0},handler({parser:e,funcName:t}){e.consumeSpaces();let n=e.
fetch();if(wi[n.text])return(t==="\\global"||t==="\\\\globallong")&&(n.text=wi[n.text]),ae(e.parseFunction(),"internal");throw new B("Invalid token after macro \
prefix",n)}});U({type:"internal",names:["\\def","\\gdef","\\edef","\\xdef"],props:{numArgs:0,allowedInText:!0,primitive:!0},handler({parser:e,funcName:t}){let n=e.
gullet.popToken(),r=n.text;if(/^(?:[\\{}$&#^_]|EOF)$/.test(r))throw new B("Expected a control sequence",n);let i=0,o,a=[[]];for(;e.gullet.future().text!=="{";)if(n=
e.gullet.popToken(),n.text==="#"){if(e.gullet.future().text==="{"){o=e.gullet.future(),a[i].push("{");break}if(n=e.gullet.popToken(),!/^[1-9]$/.test(n.text))throw new B(
`Invalid argument number "${n.text}"`);if(parseInt(n.text)!==i+1)throw new B(`Argument number "${n.text}" out of order`);i++,a.push([])}else{if(n.text==="EOF")throw new B(
"Expected a macro definition");a[i].push(n.text)}let{tokens:l}=e.gullet.consumeArg();if(o&&l.unshift(o),t==="\\edef"||t==="\\xdef"){if(l=e.gullet.expandTokens(l),
l.length>e.gullet.settings.maxExpand)throw new B("Too many expansions in an "+t);l.reverse()}return e.gullet.macros.set(r,{tokens:l,numArgs:i,delimiters:a},t===
wi[t]),{type:"internal",mode:e.mode}}});U({type:"internal",names:["\\let","\\\\globallet"],props:{numArgs:0,allowedInText:!0,primitive:!0},handler({parser:e,funcName:t}){
let n=ir(e.gullet.popToken());e.gullet.consumeSpaces();let r=$m(e);return sl(e,n,r,t==="\\\\globallet"),{type:"internal",mode:e.mode}}});U({type:"internal",names:[
"\\futurelet","\\\\globalfuture"],props:{numArgs:0,allowedInText:!0,primitive:!0},handler({parser:e,funcName:t}){let n=ir(e.gullet.popToken()),r=e.gullet.popToken(),
i=e.gullet.popToken();return sl(e,n,i,t==="\\\\globalfuture"),e.gullet.pushToken(i),e.gullet.pushToken(r),{type:"internal",mode:e.mode}}});U({type:"internal",names:[
"\\newcommand","\\renewcommand","\\providecommand"],props:{numArgs:0,allowedInText:!0,primitive:!0},handler({parser:e,funcName:t}){let n="",r=e.gullet.popToken();
r.text==="{"?(n=ir(e.gullet.popToken()),e.gullet.popToken()):n=ir(r);let i=e.gullet.isDefined(n);if(i&&t==="\\newcommand")throw new B(`\\newcommand{${n}} attemp\
ting to redefine ${n}; use \\renewcommand`);if(!i&&t==="\\renewcommand")throw new B(`\\renewcommand{${n}} when command ${n} does not yet exist; use \\newcommand`);
let o=0;if(e.gullet.future().text==="["){let l=e.gullet.popToken();if(l=e.gullet.popToken(),!/^[0-9]$/.test(l.text))throw new B(`Invalid number of arguments: "${l.
text}"`);if(o=parseInt(l.text),l=e.gullet.popToken(),l.text!=="]")throw new B(`Invalid argument "${l.text}"`)}let{tokens:a}=e.gullet.consumeArg();return t==="\\p\
rovidecommand"&&e.gullet.macros.has(n)||e.gullet.macros.set(n,{tokens:a,numArgs:o}),{type:"internal",mode:e.mode}}});var _i={"\\bigl":{mclass:"mopen",size:1},"\\\
Bigl":{mclass:"mopen",size:2},"\\biggl":{mclass:"mopen",size:3},"\\Biggl":{mclass:"mopen",size:4},"\\bigr":{mclass:"mclose",size:1},"\\Bigr":{mclass:"mclose",size:2},
"\\biggr":{mclass:"mclose",size:3},"\\Biggr":{mclass:"mclose",size:4},"\\bigm":{mclass:"mrel",size:1},"\\Bigm":{mclass:"mrel",size:2},"\\biggm":{mclass:"mrel",size:3},
"\\Biggm":{mclass:"mrel",size:4},"\\big":{mclass:"mord",size:1},"\\Big":{mclass:"mord",size:2},"\\bigg":{mclass:"mord",size:3},"\\Bigg":{mclass:"mord",size:4}},
Mi={"(":")","\\lparen":"\\rparen","[":"]","\\lbrack":"\\rbrack","\\{":"\\}","\\lbrace":"\\rbrace","\u2987":"\u2988","\\llparenthesis":"\\rrparenthesis","\\lfloor":"\
\\rfloor","\u230A":"\u230B","\\lceil":"\\rceil","\u2308":"\u2309","\\langle":"\\rangle","\u27E8":"\u27E9","\\lAngle":"\\rAngle","\u27EA":"\u27EB","\\llangle":"\\\
rrangle","\u2989":"\u298A","\\lvert":"\\rvert","\\lVert":"\\rVert","\\lgroup":"\\rgroup","\u27EE":"\u27EF","\\lmoustache":"\\rmoustache","\u23B0":"\u23B1","\\llb\
racket":"\\rrbracket","\u27E6":"\u27E7","\\lBrace":"\\rBrace","\u2983":"\u2984"},Gm=new Set(Object.keys(Mi));new Set(Object.values(Mi));var ll=new Set(["(","\\lp\
aren",")","\\rparen","[","\\lbrack","]","\\rbrack","\\{","\\lbrace","\\}","\\rbrace","\u2987","\\llparenthesis","\u2988","\\rrparenthesis","\\lfloor","\\rfloor",
"\u230A","\u230B","\\lceil","\\rceil","\u2308","\u2309","<",">","\\langle","\u27E8","\\rangle","\u27E9","\\lAngle","\u27EA","\\rAngle","\u27EB","\\llangle","\u2989",
"\\rrangle","\u298A","\\lt","\\gt","\\lvert","\\rvert","\\lVert","\\rVert","\\lgroup","\\rgroup","\u27EE","\u27EF","\\lmoustache","\\rmoustache","\u23B0","\u23B1",
"\\llbracket","\\rrbracket","\u27E6","\u27E7","\\lBrace","\\rBrace","\u2983","\u2984","/","\\backslash","|","\\vert","\\|","\\Vert","\u2016","\\uparrow","\\Uparr\
ow","\\downarrow","\\Downarrow","\\updownarrow","\\Updownarrow","."]),Hm=new Set(["}","\\left","\\middle","\\right"]),ur=e=>e.length>0&&(ll.has(e)||_i[e]||Hm.has(
e)),Cs=[0,1.2,1.8,2.4,3];function fn(e,t){e.type==="ordgroup"&&e.body.length===1&&(e=e.body[0]);let n=cr(e);if(n&&ll.has(n.text))return(n.text==="<"||n.text==="\
\\lt")&&(n.text="\u27E8"),(n.text===">"||n.text==="\\gt")&&(n.text="\u27E9"),n;throw n?new B(`Invalid delimiter '${n.text}' after '${t.funcName}'`,e):new B(`Inv\
alid delimiter type '${e.type}'`,e)}var Km=new Set(["/","\\","\\backslash","\u2216","\\vert","|"]),ar=(e,t,n,r)=>{let i=e==="."?"":e,o=new S("mo",[He(i,t)]);return o.
setAttribute("fence","true"),o.setAttribute("form",n),o.setAttribute("stretchy",r?"true":"false"),o};U({type:"delimsizing",names:["\\bigl","\\Bigl","\\biggl","\\\
Biggl","\\bigr","\\Bigr","\\biggr","\\Biggr","\\bigm","\\Bigm","\\biggm","\\Biggm","\\big","\\Big","\\bigg","\\Bigg"],props:{numArgs:1,argTypes:["primitive"]},handler:(e,t)=>{
let n=fn(t[0],e),r={type:"delimsizing",mode:e.parser.mode,size:_i[e.funcName].size,mclass:_i[e.funcName].mclass,delim:n.text},i=e.parser.fetch().text;return i!==
"^"&&i!=="_"?r:{type:"ordgroup",mode:"math",body:[r,{type:"ordgroup",mode:"math",body:[]}]}},mathmlBuilder:e=>{let t=[],n=e.delim==="."?"":e.delim;t.push(He(n,e.
mode));let r=new S("mo",t);return e.mclass==="mopen"||e.mclass==="mclose"?r.setAttribute("fence","true"):r.setAttribute("fence","false"),(Km.has(n)||n.indexOf("\
arrow")>-1)&&r.setAttribute("stretchy","true"),r.setAttribute("symmetric","true"),r.setAttribute("minsize",Cs[e.size]+"em"),r.setAttribute("maxsize",Cs[e.size]+
"em"),r}});function cl(e){if(!e.body)throw new Error("Bug: The delim ParseNode wasn't fully parsed.")}U({type:"leftright-right",names:["\\right"],props:{numArgs:1,
argTypes:["primitive"]},handler:(e,t)=>({type:"leftright-right",mode:e.parser.mode,delim:fn(t[0],e).text})});U({type:"leftright",names:["\\left"],props:{numArgs:1,
argTypes:["primitive"]},handler:(e,t)=>{let n=fn(t[0],e),r=e.parser;++r.leftrightDepth;let i=r.parseExpression(!1,"\\right",!0),o=r.fetch();for(;o.text==="\\midd\
le";){r.consume();let l=r.fetch().text;if(!Ee.math[l])throw new B(`Invalid delimiter '${l}' after '\\middle'`);fn({type:"atom",mode:"math",text:l},{funcName:"\\m\
iddle"}),i.push({type:"middle",mode:"math",delim:l}),r.consume(),i=i.concat(r.parseExpression(!1,"\\right",!0)),o=r.fetch()}--r.leftrightDepth,r.expect("\\right",
!1);let a=ae(r.parseFunction(),"leftright-right");return{type:"leftright",mode:r.mode,body:i,left:n.text,right:a.delim,isStretchy:!0}},mathmlBuilder:(e,t)=>{cl(
e);let n=Be(e.body,t),r=ar(e.left,e.mode,"prefix",!0);n.unshift(r);let i=ar(e.right,e.mode,"postfix",!0);if(e.body.length>0){let o=e.body[e.body.length-1];o.type===
"color"&&!o.isTextColor&&i.setAttribute("mathcolor",o.color)}return n.push(i),xn(n)}});U({type:"delimiter",names:Array.from(Gm),props:{numArgs:0,allowedInText:!0,
allowedInMath:!0,allowedInArgument:!0},handler:({parser:e,funcName:t,token:n})=>{if(e.mode==="text")return{type:"textord",mode:"text",text:t,loc:n.loc};if(!e.settings.
wrapDelimiterPairs)return{type:"atom",mode:"math",family:"open",loc:n.loc,text:t};let r=Mi[t],i=e.parseExpression(!1,r,!1);if(e.fetch().text!==r)throw new B("Un\
matched delimiter");return e.consume(),{type:"delimiter",mode:e.mode,body:i,left:t,right:r}},mathmlBuilder:(e,t)=>{cl(e);let n=Be(e.body,t),r=ar(e.left,e.mode,"\
prefix",!1);n.unshift(r);let i=ar(e.right,e.mode,"postfix",!1);if(e.body.length>0){let o=e.body[e.body.length-1];o.type==="color"&&!o.isTextColor&&i.setAttribute(
"mathcolor",o.color)}return n.push(i),xn(n)}});U({type:"middle",names:["\\middle"],props:{numArgs:1,argTypes:["primitive"]},handler:(e,t)=>{let n=fn(t[0],e);if(!e.
parser.leftrightDepth)throw new B("\\middle without preceding \\left",n);return{type:"middle",mode:e.parser.mode,delim:n.text}},mathmlBuilder:e=>{let t=He(e.delim,
e.mode),n=new S("mo",[t]);return n.setAttribute("stretchy","true"),n.setAttribute("form","infix"),t.text!=="/"&&(n.setAttribute("lspace","0.05em"),n.setAttribute(
"rspace","0.05em")),n}});var Wm=["\\boxed","\\fcolorbox","\\colorbox"],Zt=(e,t)=>{let n=Wm.includes(e.label)?"mrow":"menclose",r=new S(n,[pe(e.body,t)]);switch(e.
label){case"\\overline":r.setAttribute("notation","top"),r.classes.push("tml-overline");break;case"\\underline":r.setAttribute("notation","bottom"),r.classes.push(
"tml-underline");break;case"\\cancel":r.setAttribute("notation","updiagonalstrike"),r.children.push(new S("mrow",[],["tml-cancel","upstrike"]));break;case"\\bcan\
cel":r.setAttribute("notation","downdiagonalstrike"),r.children.push(new S("mrow",[],["tml-cancel","downstrike"]));break;case"\\sout":r.setAttribute("notation",
"horizontalstrike"),r.children.push(new S("mrow",[],["tml-cancel","sout"]));break;case"\\xcancel":r.setAttribute("notation","updiagonalstrike downdiagonalstrike"),
r.children.push(new S("mrow",[],["tml-cancel","tml-xcancel"]));break;case"\\longdiv":r.setAttribute("notation","longdiv"),r.classes.push("longdiv-top"),r.children.
push(new S("mrow",[],["longdiv-arc"]));break;case"\\phase":r.setAttribute("notation","phasorangle"),r.classes.push("phasor-bottom"),r.children.push(new S("mrow",
[],["phasor-angle"]));break;case"\\textcircled":r.setAttribute("notation","circle"),r.classes.push("circle-pad"),r.children.push(new S("mrow",[],["textcircle"]));
break;case"\\angl":r.setAttribute("notation","actuarial"),r.classes.push("actuarial");break;case"\\boxed":r.style.padding="3pt",r.style.border="1px solid",r.setAttribute(
"scriptlevel","0"),r.setAttribute("displaystyle","true");break;case"\\fbox":r.setAttribute("notation","box"),r.classes.push("tml-fbox");break;case"\\fcolorbox":case"\
\\colorbox":{r.style.padding="0.3em",e.label==="\\fcolorbox"&&(r.style.border="0.0667em solid "+String(e.borderColor));break}}return e.backgroundColor&&r.setAttribute(
"mathbackground",e.backgroundColor),r};U({type:"enclose",names:["\\colorbox"],props:{numArgs:2,numOptionalArgs:1,allowedInText:!0,argTypes:["raw","raw","text"]},
handler({parser:e,funcName:t},n,r){let i=r[0]&&ae(r[0],"raw").string,o="";if(i){let l=ae(n[0],"raw").string;o=Vt(i,l)}else o=hn(ae(n[0],"raw").string,e.gullet.macros);
let a=n[1];return{type:"enclose",mode:e.mode,label:t,backgroundColor:o,body:a}},mathmlBuilder:Zt});U({type:"enclose",names:["\\fcolorbox"],props:{numArgs:3,numOptionalArgs:1,
allowedInText:!0,argTypes:["raw","raw","raw","text"]},handler({parser:e,funcName:t},n,r){let i=r[0]&&ae(r[0],"raw").string,o="",a;if(i){let u=ae(n[0],"raw").string,
d=ae(n[0],"raw").string;o=Vt(i,u),a=Vt(i,d)}else o=hn(ae(n[0],"raw").string,e.gullet.macros),a=hn(ae(n[1],"raw").string,e.gullet.macros);let l=n[2];return{type:"\
enclose",mode:e.mode,label:t,backgroundColor:a,borderColor:o,body:l}},mathmlBuilder:Zt});U({type:"enclose",names:["\\fbox"],props:{numArgs:1,argTypes:["hbox"],allowedInText:!0},
handler({parser:e},t){return{type:"enclose",mode:e.mode,label:"\\fbox",body:t[0]}}});U({type:"enclose",names:["\\angl","\\cancel","\\bcancel","\\xcancel","\\over\
line","\\boxed","\\longdiv","\\phase"],props:{numArgs:1},handler({parser:e,funcName:t},n){let r=n[0];return{type:"enclose",mode:e.mode,label:t,body:r}},mathmlBuilder:Zt});
U({type:"enclose",names:["\\sout"],props:{numArgs:1,allowedInText:!0},handler({parser:e,funcName:t},n){let r=n[0];return{type:"enclose",mode:e.mode,label:t,body:r}},
mathmlBuilder:Zt});U({type:"enclose",names:["\\underline"],props:{numArgs:1,allowedInText:!0},handler({parser:e,funcName:t},n){let r=n[0];return{type:"enclose",
mode:e.mode,label:t,body:r}},mathmlBuilder:Zt});U({type:"enclose",names:["\\textcircled"],props:{numArgs:1,argTypes:["text"],allowedInArgument:!0,allowedInText:!0},
handler({parser:e,funcName:t},n){let r=n[0];return{type:"enclose",mode:e.mode,label:t,body:r}},mathmlBuilder:Zt});U({type:"environment",names:["\\begin","\\end"],
props:{numArgs:1,argTypes:["text"]},handler({parser:e,funcName:t},n){let r=n[0];if(r.type!=="ordgroup")throw new B("Invalid environment name",r);let i="";for(let o=0;o<
r.body.length;++o)i+=ae(r.body[o],"textord").text;if(t==="\\begin"){if(!Object.prototype.hasOwnProperty.call(yi,i))throw new B("No such environment: "+i,r);let o=yi[i],
{args:a,optArgs:l}=e.parseArguments("\\begin{"+i+"}",o),u={mode:e.mode,envName:i,parser:e},d=o.handler(u,a,l);e.expect("\\end",!1);let p=e.nextToken,m=ae(e.parseFunction(),
"environment");if(m.name!==i)throw new B(`Mismatch: \\begin{${i}} matched by \\end{${m.name}}`,p);return d}return{type:"environment",mode:e.mode,name:i,nameGroup:r}}});
U({type:"envTag",names:["\\env@tag"],props:{numArgs:1,argTypes:["math"]},handler({parser:e},t){return{type:"envTag",mode:e.mode,body:t[0]}},mathmlBuilder(e,t){return new S(
"mrow")}});U({type:"noTag",names:["\\env@notag"],props:{numArgs:0},handler({parser:e}){return{type:"noTag",mode:e.mode}},mathmlBuilder(e,t){return new S("mrow")}});
var Os=Object.freeze({B:8426,E:8427,F:8427,H:8387,I:8391,L:8390,M:8422,R:8393,e:8394,g:8355,o:8389}),Vm=Object.freeze({C:8426,H:8388,I:8392,R:8394,Z:8398}),Zm=Object.
freeze({C:8383,H:8389,N:8391,P:8393,Q:8393,R:8395,Z:8394}),ul=Object.freeze({"\u03F5":119527,\u03D1:119564,\u03F0:119534,\u03C6:119577,\u03F1:119535,\u03D6:119563}),
Ym=Object.freeze({"\u03F5":119643,\u03D1:119680,\u03F0:119650,\u03C6:119693,\u03F1:119651,\u03D6:119679}),Is=Object.freeze({"\u03F5":119701,\u03D1:119738,\u03F0:119708,
\u03C6:119751,\u03F1:119709,\u03D6:119737}),Xm=Object.freeze({"\u03F5":119759,\u03D1:119796,\u03F0:119766,\u03C6:119809,\u03F1:119767,\u03D6:119795}),Qm=Object.
freeze({upperCaseLatin:{normal:e=>0,bold:e=>119743,italic:e=>119795,"bold-italic":e=>119847,script:e=>Os[e]||119899,"script-bold":e=>119951,fraktur:e=>Vm[e]||120003,
"fraktur-bold":e=>120107,"double-struck":e=>Zm[e]||120055,"sans-serif":e=>120159,"sans-serif-bold":e=>120211,"sans-serif-italic":e=>120263,"sans-serif-bold-ital\
ic":e=>120380,monospace:e=>120367},lowerCaseLatin:{normal:e=>0,bold:e=>119737,italic:e=>e==="h"?8358:119789,"bold-italic":e=>119841,script:e=>Os[e]||119893,"scr\
ipt-bold":e=>119945,fraktur:e=>119997,"fraktur-bold":e=>120101,"double-struck":e=>120049,"sans-serif":e=>120153,"sans-serif-bold":e=>120205,"sans-serif-italic":e=>120257,
"sans-serif-bold-italic":e=>120309,monospace:e=>120361},upperCaseGreek:{normal:e=>0,bold:e=>119575,italic:e=>119633,"bold-italic":e=>119575,script:e=>0,"script-\
bold":e=>0,fraktur:e=>0,"fraktur-bold":e=>0,"double-struck":e=>0,"sans-serif":e=>119749,"sans-serif-bold":e=>119749,"sans-serif-italic":e=>0,"sans-serif-bold-it\
alic":e=>119807,monospace:e=>0},lowerCaseGreek:{normal:e=>0,bold:e=>119569,italic:e=>119627,"bold-italic":e=>e==="\u03D5"?119678:119685,script:e=>0,"script-bold":e=>0,
fraktur:e=>0,"fraktur-bold":e=>0,"double-struck":e=>0,"sans-serif":e=>119743,"sans-serif-bold":e=>119743,"sans-serif-italic":e=>0,"sans-serif-bold-italic":e=>119801,
monospace:e=>0},varGreek:{normal:e=>0,bold:e=>ul[e]||-51,italic:e=>0,"bold-italic":e=>Ym[e]||58,script:e=>0,"script-bold":e=>0,fraktur:e=>0,"fraktur-bold":e=>0,
"double-struck":e=>0,"sans-serif":e=>Is[e]||116,"sans-serif-bold":e=>Is[e]||116,"sans-serif-italic":e=>0,"sans-serif-bold-italic":e=>Xm[e]||174,monospace:e=>0},
numeral:{normal:e=>0,bold:e=>120734,italic:e=>0,"bold-italic":e=>0,script:e=>0,"script-bold":e=>0,fraktur:e=>0,"fraktur-bold":e=>0,"double-struck":e=>120744,"sa\
ns-serif":e=>120754,"sans-serif-bold":e=>120764,"sans-serif-italic":e=>0,"sans-serif-bold-italic":e=>0,monospace:e=>120774}}),Kt=(e,t)=>{let n=e.codePointAt(0),
r=64<n&&n<91?"upperCaseLatin":96<n&&n<123?"lowerCaseLatin":912<n&&n<938?"upperCaseGreek":944<n&&n<970||e==="\u03D5"?"lowerCaseGreek":120545<n&&n<120572||ul[e]?"\
varGreek":47<n&&n<58?"numeral":"other";return r==="other"?e:String.fromCodePoint(n+Qm[r][t](e))},jm=Object.freeze({a:"\u1D00",b:"\u0299",c:"\u1D04",d:"\u1D05",e:"\
\u1D07",f:"\uA730",g:"\u0262",h:"\u029C",i:"\u026A",j:"\u1D0A",k:"\u1D0B",l:"\u029F",m:"\u1D0D",n:"\u0274",o:"\u1D0F",p:"\u1D18",q:"\u01EB",r:"\u0280",s:"s",t:"\
\u1D1B",u:"\u1D1C",v:"\u1D20",w:"\u1D21",x:"x",y:"\u028F",z:"\u1D22"}),Jm=["mathrm","mathit"],eh=(e,t)=>{if(!Jm.includes(t)||!e.body||e.body.type!=="ordgroup"||
e.body.body.length===1||e.body.body[0].type!=="mathord")return!1;for(let n=1;n<e.body.body.length;n++){let r=e.body.body[n].type;if(!(r==="mathord"||r==="textor\
d"&&!isNaN(e.body.body[n].text)))return!1}return!0},dl=(e,t)=>{let n=e.font,r=t.withFont(n),i=pe(e.body,r);if(i.children.length===0)return i;if(n==="boldsymbol"&&
["mo","mpadded","mrow"].includes(i.type))return i.style.fontWeight="bold",i;if(eh(e,n)){let l=i.children[0].children[0].children?i.children[0].children[0]:i.children[0];
delete l.attributes.mathvariant;for(let d=1;d<i.children.length;d++)l.children[0].text+=i.children[d].children[0].children?i.children[d].children[0].children[0].
text:i.children[d].children[0].text;if(n==="mathit")return l.children[0].text=l.children[0].text.split("").map(d=>Kt(d,"italic")).join(""),l;let u=new S("mpadde\
d",[l]);return u.setAttribute("lspace","0"),u}let o=i.children[0].type==="mo";for(let l=1;l<i.children.length;l++)i.children[l].type==="mo"&&n==="boldsymbol"&&(i.
children[l].style.fontWeight="bold"),i.children[l].type!=="mi"&&(o=!1),(i.children[l].attributes&&i.children[l].attributes.mathvariant||"")!=="normal"&&(o=!1);if(!o)
return i;let a=i.children[0];for(let l=1;l<i.children.length;l++)a.children.push(i.children[l].children[0]);if(a.attributes.mathvariant&&a.attributes.mathvariant===
"normal"){let l=new S("mtext",new Ne("\u200B"));return new S("mrow",[l,a])}return a},Rs={"\\Bbb":"\\mathbb","\\bold":"\\mathbf","\\frak":"\\mathfrak","\\bm":"\\b\
oldsymbol"};U({type:"font",names:["\\mathrm","\\mathit","\\mathbf","\\mathnormal","\\up@greek","\\boldsymbol","\\mathbb","\\mathcal","\\mathfrak","\\mathscr","\\\
mathsf","\\mathsfit","\\mathtt","\\Bbb","\\bm","\\bold","\\frak"],props:{numArgs:1,allowedInArgument:!0},handler:({parser:e,funcName:t},n)=>{let r=pn(n[0]),i=t;
return i in Rs&&(i=Rs[i]),{type:"font",mode:e.mode,font:i.slice(1),body:r}},mathmlBuilder:dl});U({type:"font",names:["\\rm","\\sf","\\tt","\\bf","\\it","\\cal"],
props:{numArgs:0,allowedInText:!0},handler:({parser:e,funcName:t,breakOnTokenText:n},r)=>{let{mode:i}=e,o=e.parseExpression(!0,n,!0),a=`math${t.slice(1)}`;return{
type:"font",mode:i,font:a,body:{type:"ordgroup",mode:e.mode,body:o}}},mathmlBuilder:dl});var Ds=["display","text","script","scriptscript"],th={auto:-1,display:0,
text:0,script:1,scriptscript:2},nh=(e,t)=>{let n=t;if(e==="display"){let r=n.level>=we.SCRIPT?we.TEXT:we.DISPLAY;n=n.withLevel(r)}else e==="text"&&n.level===we.
DISPLAY?n=n.withLevel(we.TEXT):e==="auto"?n=n.incrementLevel():e==="script"?n=n.withLevel(we.SCRIPT):e==="scriptscript"&&(n=n.withLevel(we.SCRIPTSCRIPT));return n},
Li=(e,t)=>{t=nh(e.scriptLevel,t);let n=pe(e.numer,t),r=pe(e.denom,t);t.level===3&&(n.style.mathDepth="2",n.setAttribute("scriptlevel","2"),r.style.mathDepth="2",
r.setAttribute("scriptlevel","2"));let i=new S("mfrac",[n,r]);if(!e.hasBarLine)i.setAttribute("linethickness","0px");else if(e.barSize){let o=it(e.barSize,t);i.
setAttribute("linethickness",o.number+o.unit)}if(e.leftDelim!=null||e.rightDelim!=null){let o=[];if(e.leftDelim!=null){let a=new S("mo",[new Ne(e.leftDelim.replace(
"\\",""))]);a.setAttribute("fence","true"),o.push(a)}if(o.push(i),e.rightDelim!=null){let a=new S("mo",[new Ne(e.rightDelim.replace("\\",""))]);a.setAttribute("\
fence","true"),o.push(a)}i=xn(o)}return e.scriptLevel!=="auto"&&(i=new S("mstyle",[i]),i.setAttribute("displaystyle",String(e.scriptLevel==="display")),i.setAttribute(
"scriptlevel",th[e.scriptLevel])),i};U({type:"genfrac",names:["\\cfrac","\\dfrac","\\frac","\\tfrac","\\dbinom","\\binom","\\tbinom","\\\\atopfrac","\\\\bracefrac",
"\\\\brackfrac"],props:{numArgs:2,allowedInArgument:!0},handler:({parser:e,funcName:t},n)=>{let r=n[0],i=n[1],o=!1,a=null,l=null,u="auto";switch(t){case"\\cfrac":case"\
\\dfrac":case"\\frac":case"\\tfrac":o=!0;break;case"\\\\atopfrac":o=!1;break;case"\\dbinom":case"\\binom":case"\\tbinom":a="(",l=")";break;case"\\\\bracefrac":a=
"\\{",l="\\}";break;case"\\\\brackfrac":a="[",l="]";break;default:throw new Error("Unrecognized genfrac command")}return t==="\\cfrac"||t.startsWith("\\d")?u="d\
isplay":t.startsWith("\\t")&&(u="text"),{type:"genfrac",mode:e.mode,continued:!1,numer:r,denom:i,hasBarLine:o,leftDelim:a,rightDelim:l,scriptLevel:u,barSize:null}},
mathmlBuilder:Li});U({type:"infix",names:["\\over","\\choose","\\atop","\\brace","\\brack"],props:{numArgs:0,infix:!0},handler({parser:e,funcName:t,token:n}){let r;
switch(t){case"\\over":r="\\frac";break;case"\\choose":r="\\binom";break;case"\\atop":r="\\\\atopfrac";break;case"\\brace":r="\\\\bracefrac";break;case"\\brack":
r="\\\\brackfrac";break;default:throw new Error("Unrecognized infix genfrac command")}return{type:"infix",mode:e.mode,replaceWith:r,token:n}}});var Ms=function(e){
let t=null;return e.length>0&&(t=e,t=t==="."?null:t),t};U({type:"genfrac",names:["\\genfrac"],props:{numArgs:6,allowedInArgument:!0,argTypes:["math","math","siz\
e","text","math","math"]},handler({parser:e},t){let n=t[4],r=t[5],i=pn(t[0]),o=i.type==="atom"&&i.family==="open"?Ms(i.text):null,a=pn(t[1]),l=a.type==="atom"&&
a.family==="close"?Ms(a.text):null,u=ae(t[2],"size"),d,p=null;u.isBlank?d=!0:(p=u.value,d=p.number>0);let m="auto",h=t[3];if(h.type==="ordgroup"){if(h.body.length>
0){let f=ae(h.body[0],"textord");m=Ds[Number(f.text)]}}else h=ae(h,"textord"),m=Ds[Number(h.text)];return{type:"genfrac",mode:e.mode,numer:n,denom:r,continued:!1,
hasBarLine:d,barSize:p,leftDelim:o,rightDelim:l,scriptLevel:m}},mathmlBuilder:Li});U({type:"infix",names:["\\above"],props:{numArgs:1,argTypes:["size"],infix:!0},
handler({parser:e,funcName:t,token:n},r){return{type:"infix",mode:e.mode,replaceWith:"\\\\abovefrac",barSize:ae(r[0],"size").value,token:n}}});U({type:"genfrac",
names:["\\\\abovefrac"],props:{numArgs:3,argTypes:["math","size","math"]},handler:({parser:e,funcName:t},n)=>{let r=n[0],i=am(ae(n[1],"infix").barSize),o=n[2],a=i.
number>0;return{type:"genfrac",mode:e.mode,numer:r,denom:o,continued:!1,hasBarLine:a,barSize:i,leftDelim:null,rightDelim:null,scriptLevel:"auto"}},mathmlBuilder:Li});
U({type:"hbox",names:["\\hbox"],props:{numArgs:1,argTypes:["hbox"],allowedInArgument:!0,allowedInText:!1},handler({parser:e},t){return{type:"hbox",mode:e.mode,body:Ie(
t[0])}},mathmlBuilder(e,t){let n=t.withLevel(we.TEXT),r=yt(e.body,n);return lr(r)}});var rh=(e,t)=>{let n=Ni(e.label);return n.style["math-depth"]=0,new S(e.isOver?
"mover":"munder",[pe(e.base,t),n])};U({type:"horizBracket",names:["\\overbrace","\\underbrace","\\overbracket","\\underbracket"],props:{numArgs:1},handler({parser:e,
funcName:t},n){return{type:"horizBracket",mode:e.mode,label:t,isOver:/^\\over/.test(t),base:n[0]}},mathmlBuilder:rh});U({type:"html",names:["\\class","\\id","\\s\
tyle","\\data"],props:{numArgs:2,argTypes:["raw","original"],allowedInText:!0},handler:({parser:e,funcName:t,token:n},r)=>{let i=ae(r[0],"raw").string,o=r[1];if(e.
settings.strict)throw new B(`Function "${t}" is disabled in strict mode`,n);let a,l={};switch(t){case"\\class":l.class=i,a={command:"\\class",class:i};break;case"\
\\id":l.id=i,a={command:"\\id",id:i};break;case"\\style":l.style=i,a={command:"\\style",style:i};break;case"\\data":{let u=i.split(",");for(let d=0;d<u.length;d++){
let p=u[d].split("=");if(p.length!==2)throw new B("Error parsing key-value for \\data");l["data-"+p[0].trim()]=p[1].trim()}a={command:"\\data",attributes:l};break}default:
throw new Error("Unrecognized html command")}if(!e.settings.isTrusted(a))throw new B(`Function "${t}" is not trusted`,n);return{type:"html",mode:e.mode,attributes:l,
body:Ie(o)}},mathmlBuilder:(e,t)=>{let n=yt(e.body,t),r=[];e.attributes.class&&r.push(...e.attributes.class.trim().split(/\s+/)),n.classes=r;for(let i in e.attributes)
i!=="class"&&Object.prototype.hasOwnProperty.call(e.attributes,i)&&n.setAttribute(i,e.attributes[i]);return n}});var pi=function(e){if(/^[-+]? *(\d+(\.\d*)?|\.\d+)$/.
test(e))return{number:+e,unit:"bp"};{let t=/([-+]?) *(\d+(?:\.\d*)?|\.\d+) *([a-z]{2})/.exec(e);if(!t)throw new B("Invalid size: '"+e+"' in \\includegraphics");
let n={number:+(t[1]+t[2]),unit:t[3]};if(!Ys(n))throw new B("Invalid unit: '"+n.unit+"' in \\includegraphics.");return n}};U({type:"includegraphics",names:["\\in\
cludegraphics"],props:{numArgs:1,numOptionalArgs:1,argTypes:["raw","url"],allowedInText:!1},handler:({parser:e,token:t},n,r)=>{let i={number:0,unit:"em"},o={number:.9,
unit:"em"},a={number:0,unit:"em"},l="";if(r[0]){let p=ae(r[0],"raw").string.split(",");for(let m=0;m<p.length;m++){let h=p[m].split("=");if(h.length===2){let f=h[1].
trim();switch(h[0].trim()){case"alt":l=f;break;case"width":i=pi(f);break;case"height":o=pi(f);break;case"totalheight":a=pi(f);break;default:throw new B("Invalid\
 key: '"+h[0]+"' in \\includegraphics.")}}}}let u=ae(n[0],"url").url;if(l===""&&(l=u,l=l.replace(/^.*[\\/]/,""),l=l.substring(0,l.lastIndexOf("."))),!e.settings.
isTrusted({command:"\\includegraphics",url:u}))throw new B('Function "\\includegraphics" is not trusted',t);return{type:"includegraphics",mode:e.mode,alt:l,width:i,
height:o,totalheight:a,src:u}},mathmlBuilder:(e,t)=>{let n=it(e.height,t),r={number:0,unit:"em"};e.totalheight.number>0&&e.totalheight.unit===n.unit&&e.totalheight.
number>n.number&&(r.number=e.totalheight.number-n.number,r.unit=n.unit);let i=0;e.width.number>0&&(i=it(e.width,t));let o={height:n.number+r.number+"em"};i.number>
0&&(o.width=i.number+i.unit),r.number>0&&(o.verticalAlign=-r.number+r.unit);let a=new fi(e.src,e.alt,o);return a.height=n,a.depth=r,new S("mtext",[a])}});U({type:"\
kern",names:["\\kern","\\mkern","\\hskip","\\mskip"],props:{numArgs:1,argTypes:["size"],primitive:!0,allowedInText:!0},handler({parser:e,funcName:t,token:n},r){
let i=ae(r[0],"size");if(e.settings.strict){let o=t[1]==="m",a=i.value.unit==="mu";if(o){if(!a)throw new B(`LaTeX's ${t} supports only mu units, not ${i.value.unit}\
 units`,n);if(e.mode!=="math")throw new B(`LaTeX's ${t} works only in math mode`,n)}else if(a)throw new B(`LaTeX's ${t} doesn't support mu units`,n)}return{type:"\
kern",mode:e.mode,dimension:i.value}},mathmlBuilder(e,t){let n=it(e.dimension,t),r=n.number>0&&n.unit==="em"?pl(n.number):"";if(e.mode==="text"&&r.length>0){let i=new Ne(
r);return new S("mtext",[i])}else if(n.number>=0){let i=new S("mspace");return i.setAttribute("width",n.number+n.unit),i}else{let i=new S("mrow");return i.style.
marginLeft=n.number+n.unit,i}}});var pl=function(e){return e>=.05555&&e<=.05556?"\u200A":e>=.1666&&e<=.1667?"\u2009":e>=.2222&&e<=.2223?"\u2005":e>=.2777&&e<=.2778?
"\u2005\u200A":""},ml=/[^A-Za-z_0-9-]/g;U({type:"label",names:["\\label"],props:{numArgs:1,argTypes:["raw"]},handler({parser:e},t){return{type:"label",mode:e.mode,
string:t[0].string.replace(ml,"")}},mathmlBuilder(e,t){let n=new S("mrow",[],["tml-label"]);return e.string.length>0&&n.setLabel(e.string),n}});var ih=["\\clap",
"\\llap","\\rlap"];U({type:"lap",names:["\\mathllap","\\mathrlap","\\mathclap","\\clap","\\llap","\\rlap"],props:{numArgs:1,allowedInText:!0},handler:({parser:e,
funcName:t,token:n},r)=>{if(ih.includes(t)){if(e.settings.strict&&e.mode!=="text")throw new B(`{${t}} can be used only in text mode.
 Try \\math${t.slice(1)}`,n);t=t.slice(1)}else t=t.slice(5);let i=r[0];return{type:"lap",mode:e.mode,alignment:t,body:i}},mathmlBuilder:(e,t)=>{let n;if(e.alignment===
"llap"){let o=Be(Ie(e.body),t),a=new S("mphantom",o);n=new S("mpadded",[a]),n.setAttribute("width","0.1px")}let r=pe(e.body,t),i;if(e.alignment==="llap"?(r.style.
position="absolute",r.style.right="0",r.style.bottom="0",i=new S("mpadded",[n,r])):i=new S("mpadded",[r]),e.alignment==="rlap")e.body.body.length>0&&e.body.body[0].
type==="genfrac"&&i.setAttribute("lspace","0.16667em");else{let o=e.alignment==="llap"?"-1":"-0.5";i.setAttribute("lspace",o+"width"),e.alignment==="llap"?i.style.
position="relative":(i.style.display="flex",i.style.justifyContent="center")}return i.setAttribute("width","0.1px"),i}});U({type:"ordgroup",names:["\\(","$"],props:{
numArgs:0,allowedInText:!0,allowedInMath:!1},handler({funcName:e,parser:t},n){let r=t.mode;t.switchMode("math");let i=e==="\\("?"\\)":"$",o=t.parseExpression(!1,
i);return t.expect(i),t.switchMode(r),{type:"ordgroup",mode:t.mode,body:o}}});U({type:"text",names:["\\)","\\]"],props:{numArgs:0,allowedInText:!0,allowedInMath:!1},
handler(e,t){throw new B(`Mismatched ${e.funcName}`,t)}});var ah=(e,t)=>{switch(t.level){case we.DISPLAY:return e.display;case we.TEXT:return e.text;case we.SCRIPT:
return e.script;case we.SCRIPTSCRIPT:return e.scriptscript;default:return e.text}};U({type:"mathchoice",names:["\\mathchoice"],props:{numArgs:4,primitive:!0},handler:({
parser:e},t)=>({type:"mathchoice",mode:e.mode,display:Ie(t[0]),text:Ie(t[1]),script:Ie(t[2]),scriptscript:Ie(t[3])}),mathmlBuilder:(e,t)=>{let n=ah(e,t);return yt(
n,t)}});var oh=["text","textord","mathord","atom"];function hl(e,t){let n,r=Be(e.body,t);if(e.mclass==="minner")n=new S("mpadded",r);else if(e.mclass==="mord")e.
isCharacterBox||r[0].type==="mathord"?(n=r[0],n.type="mi",n.children.length===1&&n.children[0].text&&n.children[0].text==="\u2207"&&n.setAttribute("mathvariant",
"normal")):n=new S("mi",r);else{n=new S("mrow",r),e.mustPromote?(n=r[0],n.type="mo",e.isCharacterBox&&e.body[0].text&&/[A-Za-z]/.test(e.body[0].text)&&n.setAttribute(
"mathvariant","italic")):n=new S("mrow",r);let i=t.level<2;n.type==="mrow"?i&&(e.mclass==="mbin"?(n.children.unshift(Te(.2222)),n.children.push(Te(.2222))):e.mclass===
"mrel"?(n.children.unshift(Te(.2778)),n.children.push(Te(.2778))):e.mclass==="mpunct"?n.children.push(Te(.1667)):e.mclass==="minner"&&(n.children.unshift(Te(.0556)),
n.children.push(Te(.0556)))):e.mclass==="mbin"?(n.attributes.lspace=i?"0.2222em":"0",n.attributes.rspace=i?"0.2222em":"0"):e.mclass==="mrel"?(n.attributes.lspace=
i?"0.2778em":"0",n.attributes.rspace=i?"0.2778em":"0"):e.mclass==="mpunct"?(n.attributes.lspace="0em",n.attributes.rspace=i?"0.1667em":"0"):e.mclass==="mopen"||
e.mclass==="mclose"?(n.attributes.lspace="0em",n.attributes.rspace="0em"):e.mclass==="minner"&&i&&(n.attributes.lspace="0.0556em",n.attributes.width="+0.1111em"),
e.mclass==="mopen"||e.mclass==="mclose"||(delete n.attributes.stretchy,delete n.attributes.form)}return n}U({type:"mclass",names:["\\mathord","\\mathbin","\\math\
rel","\\mathopen","\\mathclose","\\mathpunct","\\mathinner"],props:{numArgs:1,primitive:!0},handler({parser:e,funcName:t},n){let r=n[0],i=sr(r),o=!0,a={type:"ma\
thord",text:"",mode:e.mode},l=r.body?r.body:[r];for(let u of l)if(oh.includes(u.type))Ee[e.mode][u.text]?a.text+=Ee[e.mode][u.text].replace:u.text?a.text+=u.text:
u.body&&u.body.map(d=>{a.text+=d.text});else{o=!1;break}return o&&t==="\\mathord"&&a.type==="mathord"&&a.text.length>1?a:{type:"mclass",mode:e.mode,mclass:"m"+t.
slice(5),body:Ie(o?a:r),isCharacterBox:i,mustPromote:o}},mathmlBuilder:hl});var fl=e=>{let t=e.type==="ordgroup"&&e.body.length&&e.body.length===1?e.body[0]:e;if(t.
type==="atom"){let n=e.body.length>0&&e.body[0].text&&Ee.math[e.body[0].text]?Ee.math[e.body[0].text].group:t.family;return n==="bin"||n==="rel"?"m"+n:"mord"}else
return"mord"};U({type:"mclass",names:["\\@binrel"],props:{numArgs:2},handler({parser:e},t){return{type:"mclass",mode:e.mode,mclass:fl(t[0]),body:Ie(t[1]),isCharacterBox:sr(
t[1])}}});U({type:"mclass",names:["\\stackrel","\\overset","\\underset"],props:{numArgs:2},handler({parser:e,funcName:t},n){let r=n[1],i=n[0],o;t!=="\\stackrel"?
o=fl(r):o="mrel";let l={type:o==="mrel"||o==="mbin"?"op":"ordgroup",mode:r.mode,limits:!0,alwaysHandleSupSub:!0,parentIsSupSub:!1,symbol:!1,suppressBaseShift:t!==
"\\stackrel",body:Ie(r)};return{type:"supsub",mode:i.mode,stack:!0,base:l,sup:t==="\\underset"?null:i,sub:t==="\\underset"?i:null}},mathmlBuilder:hl});var Xn=(e,t,n)=>{
if(!e)return n;let r=pe(e,t);return r.type==="mrow"&&r.children.length===0?n:r};U({type:"multiscript",names:["\\sideset","\\pres@cript"],props:{numArgs:3},handler({
parser:e,funcName:t,token:n},r){if(r[2].body.length===0)throw new B(t+"cannot parse an empty base.");let i=r[2].body[0];if(e.settings.strict&&t==="\\sideset"&&!i.
symbol)throw new B("The base of \\sideset must be a big operator. Try \\prescript.");if(r[0].body.length>0&&r[0].body[0].type!=="supsub"||r[1].body.length>0&&r[1].
body[0].type!=="supsub")throw new B("\\sideset can parse only subscripts and superscripts in its first two arguments",n);let o=r[0].body.length>0?r[0].body[0]:null,
a=r[1].body.length>0?r[1].body[0]:null;return!o&&!a?i:o?{type:"multiscript",mode:e.mode,isSideset:t==="\\sideset",prescripts:o,postscripts:a,base:i}:{type:"styl\
ing",mode:e.mode,scriptLevel:"text",body:[{type:"supsub",mode:e.mode,base:i,sup:a.sup,sub:a.sub}]}},mathmlBuilder(e,t){let n=pe(e.base,t),r=new S("mprescripts"),
i=new S("none"),o=[],a=Xn(e.prescripts.sub,t,i),l=Xn(e.prescripts.sup,t,i);if(e.isSideset&&(a.setAttribute("style","text-align: left;"),l.setAttribute("style","\
text-align: left;")),e.postscripts){let u=Xn(e.postscripts.sub,t,i),d=Xn(e.postscripts.sup,t,i);o=[n,u,d,r,a,l]}else o=[n,r,a,l];return new S("mmultiscripts",o)}});
U({type:"not",names:["\\not"],props:{numArgs:1,primitive:!0,allowedInText:!1},handler({parser:e},t){let n=sr(t[0]),r;return n?(r=Ie(t[0]),r[0].text.charAt(0)===
"\\"&&(r[0].text=Ee.math[r[0].text].replace),r[0].text=r[0].text.slice(0,1)+"\u0338"+r[0].text.slice(1)):r=[{type:"textord",mode:"math",text:"\u0338"},{type:"ke\
rn",mode:"math",dimension:{number:-.6,unit:"em"}},t[0]],{type:"not",mode:e.mode,body:r,isCharacterBox:n}},mathmlBuilder(e,t){return e.isCharacterBox?Be(e.body,t,
!0)[0]:yt(e.body,t)}});var sh=["textord","mathord","atom"],lh=["\\smallint"],Bi=["textord","mathord","ordgroup","close","leftright","font"],Ls=e=>{e.attributes.
lspace="0.1667em",e.attributes.rspace="0.1667em"},wn=(e,t)=>{let n;if(e.symbol)n=new S("mo",[He(e.name,e.mode)]),lh.includes(e.name)?n.setAttribute("largeop","f\
alse"):n.setAttribute("movablelimits","false"),e.fromMathOp&&Ls(n);else if(e.body)n=new S("mo",Be(e.body,t)),e.fromMathOp&&Ls(n);else if(n=new S("mi",[new Ne(e.
name.slice(1))]),!e.parentIsSupSub){let r=new S("mo",[He("\u2061","text")]),i=[n,r];if(e.needsLeadingSpace){let o=new S("mspace");o.setAttribute("width","0.1667\
em"),i.unshift(o)}if(!e.isFollowedByDelimiter){let o=new S("mspace");o.setAttribute("width","0.1667em"),i.push(o)}n=new S("mrow",i)}return n},ch={"\u220F":"\\pro\
d","\u2210":"\\coprod","\u2211":"\\sum","\u22C0":"\\bigwedge","\u22C1":"\\bigvee","\u22C2":"\\bigcap","\u22C3":"\\bigcup","\u2A00":"\\bigodot","\u2A01":"\\bigopl\
us","\u2A02":"\\bigotimes","\u2A04":"\\biguplus","\u2A05":"\\bigsqcap","\u2A06":"\\bigsqcup","\u2A03":"\\bigcupdot","\u2A07":"\\bigdoublevee","\u2A08":"\\bigdoub\
lewedge","\u2A09":"\\bigtimes"};U({type:"op",names:["\\coprod","\\bigvee","\\bigwedge","\\biguplus","\\bigcupplus","\\bigcupdot","\\bigcap","\\bigcup","\\bigdoub\
levee","\\bigdoublewedge","\\intop","\\prod","\\sum","\\bigotimes","\\bigoplus","\\bigodot","\\bigsqcap","\\bigsqcup","\\bigtimes","\\smallint","\u220F","\u2210",
"\u2211","\u22C0","\u22C1","\u22C2","\u22C3","\u2A00","\u2A01","\u2A02","\u2A03","\u2A04","\u2A05","\u2A06","\u2A07","\u2A08","\u2A09"],props:{numArgs:0},handler:({
parser:e,funcName:t},n)=>{let r=t;return r.length===1&&(r=ch[r]),{type:"op",mode:e.mode,limits:!0,parentIsSupSub:!1,symbol:!0,stack:!1,name:r}},mathmlBuilder:wn});
U({type:"op",names:["\\mathop"],props:{numArgs:1,primitive:!0},handler:({parser:e},t)=>{let n=t[0],r=n.body?n.body:[n],i=r.length===1&&sh.includes(r[0].type);return{
type:"op",mode:e.mode,limits:!0,parentIsSupSub:!1,symbol:i,fromMathOp:!0,stack:!1,name:i?r[0].text:null,body:i?null:Ie(n)}},mathmlBuilder:wn});var uh={"\u222B":"\
\\int","\u222C":"\\iint","\u222D":"\\iiint","\u222E":"\\oint","\u222F":"\\oiint","\u2230":"\\oiiint","\u2231":"\\intclockwise","\u2232":"\\varointclockwise","\u2A0C":"\
\\iiiint","\u2A0D":"\\intbar","\u2A0E":"\\intBar","\u2A0F":"\\fint","\u2A12":"\\rppolint","\u2A13":"\\scpolint","\u2A15":"\\pointint","\u2A16":"\\sqint","\u2A17":"\
\\intlarhk","\u2A18":"\\intx","\u2A19":"\\intcap","\u2A1A":"\\intcup"};U({type:"op",names:["\\arcsin","\\arccos","\\arctan","\\arctg","\\arcctg","\\arg","\\ch",
"\\cos","\\cosec","\\cosh","\\cot","\\cotg","\\coth","\\csc","\\ctg","\\cth","\\deg","\\dim","\\exp","\\hom","\\ker","\\lg","\\ln","\\log","\\sec","\\sin","\\sin\
h","\\sh","\\sgn","\\tan","\\tanh","\\tg","\\th"],props:{numArgs:0},handler({parser:e,funcName:t}){let n=e.prevAtomType,r=e.gullet.future().text;return{type:"op",
mode:e.mode,limits:!1,parentIsSupSub:!1,symbol:!1,stack:!1,isFollowedByDelimiter:ur(r),needsLeadingSpace:n.length>0&&Bi.includes(n),name:t}},mathmlBuilder:wn});
U({type:"op",names:["\\det","\\gcd","\\inf","\\lim","\\max","\\min","\\Pr","\\sup"],props:{numArgs:0},handler({parser:e,funcName:t}){let n=e.prevAtomType,r=e.gullet.
future().text;return{type:"op",mode:e.mode,limits:!0,parentIsSupSub:!1,symbol:!1,stack:!1,isFollowedByDelimiter:ur(r),needsLeadingSpace:n.length>0&&Bi.includes(
n),name:t}},mathmlBuilder:wn});U({type:"op",names:["\\int","\\iint","\\iiint","\\iiiint","\\oint","\\oiint","\\oiiint","\\intclockwise","\\varointclockwise","\\i\
ntbar","\\intBar","\\fint","\\rppolint","\\scpolint","\\pointint","\\sqint","\\intlarhk","\\intx","\\intcap","\\intcup","\u222B","\u222C","\u222D","\u222E","\u222F",
"\u2230","\u2231","\u2232","\u2A0C","\u2A0D","\u2A0E","\u2A0F","\u2A12","\u2A13","\u2A15","\u2A16","\u2A17","\u2A18","\u2A19","\u2A1A"],props:{numArgs:0,allowedInArgument:!0},
handler({parser:e,funcName:t}){let n=t;return n.length===1&&(n=uh[n]),{type:"op",mode:e.mode,limits:!1,parentIsSupSub:!1,symbol:!0,stack:!1,name:n}},mathmlBuilder:wn});
var dh=(e,t)=>{let n=Be(e.body,t.withFont("mathrm")),r=!0;for(let o=0;o<n.length;o++){let a=n[o];if(a instanceof S)switch(((a.type==="mrow"||a.type==="mpadded")&&
a.children.length===1&&a.children[0]instanceof S||a.type==="mrow"&&a.children.length===2&&a.children[0]instanceof S&&a.children[1]instanceof S&&a.children[1].type===
"mspace"&&!a.children[1].attributes.width&&a.children[1].children.length===0)&&(a=a.children[0]),a.type){case"mi":case"mn":case"ms":case"mtext":break;case"mspac\
e":if(a.attributes.width){let l=a.attributes.width.replace("em",""),u=pl(Number(l));u===""?r=!1:n[o]=new S("mtext",[new Ne(u)])}break;case"mo":{let l=a.children[0];
a.children.length===1&&l instanceof Ne?l.text=l.text.replace(/\u2212/,"-").replace(/\u2217/,"*"):r=!1;break}default:r=!1}else r=!1}if(r){let o=n.map(a=>a.toText()).
join("");n=[new Ne(o)]}else if(n.length===1&&["mover","munder"].includes(n[0].type)&&(n[0].children[0].type==="mi"||n[0].children[0].type==="mtext")){if(n[0].children[0].
type="mi",e.parentIsSupSub)return new S("mrow",n);{let o=new S("mo",[He("\u2061","text")]);return Ct([n[0],o])}}let i;if(r?(i=new S("mi",n),n[0].text.length===1&&
i.setAttribute("mathvariant","normal")):i=new S("mrow",n),!e.parentIsSupSub){let o=new S("mo",[He("\u2061","text")]),a=[i,o];if(e.needsLeadingSpace){let l=new S(
"mspace");l.setAttribute("width","0.1667em"),a.unshift(l)}if(!e.isFollowedByDelimiter){let l=new S("mspace");l.setAttribute("width","0.1667em"),a.push(l)}return Ct(
a)}return i};U({type:"operatorname",names:["\\operatorname@","\\operatornamewithlimits"],props:{numArgs:1,allowedInArgument:!0},handler:({parser:e,funcName:t},n)=>{
let r=n[0],i=e.prevAtomType,o=e.gullet.future().text;return{type:"operatorname",mode:e.mode,body:Ie(r),alwaysHandleSupSub:t==="\\operatornamewithlimits",limits:!1,
parentIsSupSub:!1,isFollowedByDelimiter:ur(o),needsLeadingSpace:i.length>0&&Bi.includes(i)}},mathmlBuilder:dh});g("\\operatorname","\\@ifstar\\operatornamewithlim\
its\\operatorname@");Ot({type:"ordgroup",mathmlBuilder(e,t){return yt(e.body,t,e.semisimple)}});U({type:"phantom",names:["\\phantom"],props:{numArgs:1,allowedInText:!0},
handler:({parser:e},t)=>{let n=t[0];return{type:"phantom",mode:e.mode,body:Ie(n)}},mathmlBuilder:(e,t)=>{let n=Be(e.body,t);return new S("mphantom",n)}});U({type:"\
hphantom",names:["\\hphantom"],props:{numArgs:1,allowedInText:!0},handler:({parser:e},t)=>{let n=t[0];return{type:"hphantom",mode:e.mode,body:n}},mathmlBuilder:(e,t)=>{
let n=Be(Ie(e.body),t),r=new S("mphantom",n),i=new S("mpadded",[r]);return i.setAttribute("height","0px"),i.setAttribute("depth","0px"),i}});U({type:"vphantom",
names:["\\vphantom"],props:{numArgs:1,allowedInText:!0},handler:({parser:e},t)=>{let n=t[0];return{type:"vphantom",mode:e.mode,body:n}},mathmlBuilder:(e,t)=>{let n=Be(
Ie(e.body),t),r=new S("mphantom",n),i=new S("mpadded",[r]);return i.setAttribute("width","0.1px"),i}});U({type:"pmb",names:["\\pmb"],props:{numArgs:1,allowedInText:!0},
handler({parser:e},t){return{type:"pmb",mode:e.mode,body:Ie(t[0])}},mathmlBuilder(e,t){let n=Be(e.body,t),r=Ti(n);return r.setAttribute("style","font-weight:bol\
d"),r}});var gl=(e,t)=>{let n=t.withLevel(we.TEXT),r=new S("mpadded",[pe(e.body,n)]),i=it(e.dy,t);return r.setAttribute("voffset",i.number+i.unit),i.number>0?r.
style.padding=i.number+i.unit+" 0 0 0":r.style.padding="0 0 "+Math.abs(i.number)+i.unit+" 0",r};U({type:"raise",names:["\\raise","\\lower"],props:{numArgs:2,argTypes:[
"size","primitive"],primitive:!0},handler({parser:e,funcName:t},n){let r=ae(n[0],"size").value;t==="\\lower"&&(r.number*=-1);let i=n[1];return{type:"raise",mode:e.
mode,dy:r,body:i}},mathmlBuilder:gl});U({type:"raise",names:["\\raisebox"],props:{numArgs:2,argTypes:["size","hbox"],allowedInText:!0},handler({parser:e,funcName:t},n){
let r=ae(n[0],"size").value,i=n[1];return{type:"raise",mode:e.mode,dy:r,body:i}},mathmlBuilder:gl});U({type:"ref",names:["\\ref","\\eqref"],props:{numArgs:1,argTypes:[
"raw"]},handler({parser:e,funcName:t},n){return{type:"ref",mode:e.mode,funcName:t,string:n[0].string.replace(ml,"")}},mathmlBuilder(e,t){let n=e.funcName==="\\re\
f"?["tml-ref"]:["tml-ref","tml-eqref"];return new nr("#"+e.string,n,null)}});U({type:"reflect",names:["\\reflectbox"],props:{numArgs:1,argTypes:["hbox"],allowedInText:!0},
handler({parser:e},t){return{type:"reflect",mode:e.mode,body:t[0]}},mathmlBuilder(e,t){let n=pe(e.body,t);return n.style.transform="scaleX(-1)",n}});U({type:"in\
ternal",names:["\\relax"],props:{numArgs:0,allowedInText:!0,allowedInArgument:!0},handler({parser:e}){return{type:"internal",mode:e.mode}}});U({type:"rule",names:[
"\\rule"],props:{numArgs:2,numOptionalArgs:1,allowedInText:!0,allowedInMath:!0,argTypes:["size","size","size"]},handler({parser:e},t,n){let r=n[0],i=ae(t[0],"si\
ze"),o=ae(t[1],"size");return{type:"rule",mode:e.mode,shift:r&&ae(r,"size").value,width:i.value,height:o.value}},mathmlBuilder(e,t){let n=it(e.width,t),r=it(e.height,
t),i=e.shift?it(e.shift,t):{number:0,unit:"em"},o=t.color&&t.getColor()||"black",a=new S("mspace");if(n.number>0&&r.number>0&&a.setAttribute("mathbackground",o),
a.setAttribute("width",n.number+n.unit),a.setAttribute("height",r.number+r.unit),i.number===0)return a;let l=new S("mpadded",[a]);return i.number>=0?l.setAttribute(
"height","+"+i.number+i.unit):(l.setAttribute("height",i.number+i.unit),l.setAttribute("depth","+"+-i.number+i.unit)),l.setAttribute("voffset",i.number+i.unit),
l}});var Bs=/^[0-9]$/,ph={0:"\u2080",1:"\u2081",2:"\u2082",3:"\u2083",4:"\u2084",5:"\u2085",6:"\u2086",7:"\u2087",8:"\u2088",9:"\u2089"},mh={0:"\u2070",1:"\xB9",
2:"\xB2",3:"\xB3",4:"\u2074",5:"\u2075",6:"\u2076",7:"\u2077",8:"\u2078",9:"\u2079"};U({type:"sfrac",names:["\\sfrac"],props:{numArgs:2,allowedInText:!0,allowedInMath:!0},
handler({parser:e},t){let n="";for(let i of t[0].body){if(i.type!=="textord"||!Bs.test(i.text))throw new B("Numerator must be an integer.",i);n+=i.text}let r="";
for(let i of t[1].body){if(i.type!=="textord"||!Bs.test(i.text))throw new B("Denominator must be an integer.",i);r+=i.text}return{type:"sfrac",mode:e.mode,numerator:n,
denominator:r}},mathmlBuilder(e,t){let n=e.numerator.split("").map(o=>mh[o]).join(""),r=e.denominator.split("").map(o=>ph[o]).join(""),i=new Ne(n+"\u2044"+r,e.mode,
t);return new S("mn",[i],["special-fraction"])}});var qs={"\\tiny":.5,"\\sixptsize":.6,"\\Tiny":.6,"\\scriptsize":.7,"\\footnotesize":.8,"\\small":.9,"\\normalsi\
ze":1,"\\large":1.2,"\\Large":1.44,"\\LARGE":1.728,"\\huge":2.074,"\\Huge":2.488};U({type:"sizing",names:["\\tiny","\\sixptsize","\\Tiny","\\scriptsize","\\footn\
otesize","\\small","\\normalsize","\\large","\\Large","\\LARGE","\\huge","\\Huge"],props:{numArgs:0,allowedInText:!0},handler:({breakOnTokenText:e,funcName:t,parser:n},r)=>{
n.settings.strict&&n.mode==="math"&&console.log(`Temml strict-mode warning: Command ${t} is invalid in math mode.`);let i=n.parseExpression(!1,e,!0);return{type:"\
sizing",mode:n.mode,funcName:t,body:i}},mathmlBuilder:(e,t)=>{let n=t.withFontSize(qs[e.funcName]),r=Be(e.body,n),i=Ti(r),o=(qs[e.funcName]/t.fontSize).toFixed(
4);return i.setAttribute("mathsize",o+"em"),i}});U({type:"smash",names:["\\smash"],props:{numArgs:1,numOptionalArgs:1,allowedInText:!0},handler:({parser:e},t,n)=>{
let r=!1,i=!1,o=n[0]&&ae(n[0],"ordgroup");if(o){let l="";for(let u=0;u<o.body.length;++u)if(l=o.body[u].text,l==="t")r=!0;else if(l==="b")i=!0;else{r=!1,i=!1;break}}else
r=!0,i=!0;let a=t[0];return{type:"smash",mode:e.mode,body:a,smashHeight:r,smashDepth:i}},mathmlBuilder:(e,t)=>{let n=new S("mpadded",[pe(e.body,t)]);return e.smashHeight&&
n.setAttribute("height","0px"),e.smashDepth&&n.setAttribute("depth","0px"),n}});var hh=["a","c","e","\u0131","m","n","o","r","s","u","v","w","x","z","\u03B1","\u03B5",
"\u03B9","\u03BA","\u03BD","\u03BF","\u03C0","\u03C3","\u03C4","\u03C5","\u03C9","\\alpha","\\epsilon","\\iota","\\kappa","\\nu","\\omega","\\pi","\\tau","\\omeg\
a"];U({type:"sqrt",names:["\\sqrt"],props:{numArgs:1,numOptionalArgs:1},handler({parser:e},t,n){let r=n[0],i=t[0];return i.body&&i.body.length===1&&i.body[0].text&&
hh.includes(i.body[0].text)&&i.body.push({type:"rule",mode:"math",shift:null,width:{number:0,unit:"pt"},height:{number:.5,unit:"em"}}),{type:"sqrt",mode:e.mode,
body:i,index:r}},mathmlBuilder(e,t){let{body:n,index:r}=e;return r?new S("mroot",[pe(n,t),pe(r,t.incrementLevel())]):new S("msqrt",[pe(n,t)])}});var fh={display:0,
text:1,script:2,scriptscript:3},gh={display:["0","true"],text:["0","false"],script:["1","false"],scriptscript:["2","false"]};U({type:"styling",names:["\\displays\
tyle","\\textstyle","\\scriptstyle","\\scriptscriptstyle"],props:{numArgs:0,allowedInText:!0,primitive:!0},handler({breakOnTokenText:e,funcName:t,parser:n},r){let i=n.
parseExpression(!0,e,!0),o=t.slice(1,t.length-5);return{type:"styling",mode:n.mode,scriptLevel:o,body:i}},mathmlBuilder(e,t){let n=t.withLevel(fh[e.scriptLevel]),
r=Be(e.body,n),i=Ti(r),o=gh[e.scriptLevel];return i.setAttribute("scriptlevel",o[0]),i.setAttribute("displaystyle",o[1]),i}});var bh=/^m(over|under|underover)$/,
xh="DHKLUcegorsuvxyz\u03A0\u03A5\u03A8\u03B1\u03B4\u03B7\u03B9\u03BC\u03BD\u03BF\u03C4\u03C5\u03C7\u03F5",yh="BCEFGIMNOPQRSTXZlpqtw\u0393\u0398\u039E\u03A3\u03A6\u03A9\u03B2\u03B5\u03B6\u03B8\u03BE\u03C1\u03C2\u03C6\u03C8\u03D1\u03D5\u03F1",
wh="AJdf\u0394\u039B";Ot({type:"supsub",mathmlBuilder(e,t){let n=!1,r,i,o=!1,a=!1,l=!1;e.base&&e.base.type==="horizBracket"&&(i=!!e.sup,i===e.base.isOver&&(n=!0,
r=e.base.isOver)),e.base&&!e.stack&&(e.base.type==="op"||e.base.type==="operatorname")&&(e.base.parentIsSupSub=!0,o=!e.base.symbol,a=o&&!e.isFollowedByDelimiter,
l=e.base.needsLeadingSpace);let u=e.stack&&e.base.body.length===1?[pe(e.base.body[0],t)]:[pe(e.base,t)],d=t.inSubOrSup();if(e.sub){let h=pe(e.sub,d);t.level===3&&
h.setAttribute("scriptlevel","2"),u.push(h)}if(e.sup){let h=pe(e.sup,d);if(t.level===3&&h.setAttribute("scriptlevel","2"),e.base&&e.base.text&&e.base.text.length===
1){let f=e.base.text;xh.indexOf(f)>-1?h.classes.push("tml-sml-pad"):yh.indexOf(f)>-1?h.classes.push("tml-med-pad"):wh.indexOf(f)>-1&&h.classes.push("tml-lrg-pad")}
u.push(h)}let p;if(n)p=r?"mover":"munder";else if(e.sub)if(e.sup){let h=e.base;h&&(h.type==="op"&&h.limits||h.type==="multiscript")&&(t.level===we.DISPLAY||h.alwaysHandleSupSub)||
h&&h.type==="operatorname"&&h.alwaysHandleSupSub&&(t.level===we.DISPLAY||h.limits)?p="munderover":p="msubsup"}else{let h=e.base;e.stack||h&&h.type==="op"&&h.limits&&
(t.level===we.DISPLAY||h.alwaysHandleSupSub)||h&&h.type==="operatorname"&&h.alwaysHandleSupSub&&(h.limits||t.level===we.DISPLAY)?p="munder":p="msub"}else{let h=e.
base;h&&h.type==="op"&&h.limits&&(t.level===we.DISPLAY||h.alwaysHandleSupSub)||h&&h.type==="operatorname"&&h.alwaysHandleSupSub&&(h.limits||t.level===we.DISPLAY)?
p="mover":p="msup"}let m=new S(p,u);if(o){let h=new S("mo",[He("\u2061","text")]);if(l){let f=new S("mspace");f.setAttribute("width","0.1667em"),m=Ct([f,m,h])}else
m=Ct([m,h]);if(a){let f=new S("mspace");f.setAttribute("width","0.1667em"),m.children.push(f)}}else bh.test(p)&&(m=new S("mrow",[m]));return m}});var _h=["\\shor\
tmid","\\nshortmid","\\shortparallel","\\nshortparallel","\\smallsetminus"],Eh=["\\Rsh","\\Lsh","\\restriction"],kh=e=>{if(e.length===1){let t=e.codePointAt(0);
return 8591<t&&t<8704}return e.indexOf("arrow")>-1||e.indexOf("harpoon")>-1||Eh.includes(e)};Ot({type:"atom",mathmlBuilder(e,t){let n=new S("mo",[He(e.text,e.mode)]);
if(e.family==="punct")n.setAttribute("separator","true");else if(e.family==="open"||e.family==="close")e.family==="open"?(n.setAttribute("form","prefix"),n.setAttribute(
"stretchy","false")):e.family==="close"&&(n.setAttribute("form","postfix"),n.setAttribute("stretchy","false"));else if(e.text==="\\mid")n.setAttribute("lspace",
"0.22em"),n.setAttribute("rspace","0.22em"),n.setAttribute("stretchy","false");else if(e.family==="rel"&&kh(e.text))n.setAttribute("stretchy","false");else if(_h.
includes(e.text))n.setAttribute("mathsize","70%");else if(e.text===":")n.attributes.lspace="0.2222em",n.attributes.rspace="0.2222em";else if(e.needsSpacing)return e.
family==="bin"?new S("mrow",[Te(.222),n,Te(.222)]):new S("mrow",[Te(.2778),n,Te(.2778)]);return n}});var Fs={mathbf:"bold",mathrm:"normal",textit:"italic",mathit:"\
italic",mathnormal:"italic",mathbb:"double-struck",mathcal:"script",mathfrak:"fraktur",mathscr:"script",mathsf:"sans-serif",mathtt:"monospace"},bl=function(e,t){
if(t.fontFamily==="texttt")return"monospace";if(t.fontFamily==="textsc")return"normal";if(t.fontFamily==="textsf")return t.fontShape==="textit"&&t.fontWeight===
"textbf"?"sans-serif-bold-italic":t.fontShape==="textit"?"sans-serif-italic":t.fontWeight==="textbf"?"sans-serif-bold":"sans-serif";if(t.fontShape==="textit"&&t.
fontWeight==="textbf")return"bold-italic";if(t.fontShape==="textit")return"italic";if(t.fontWeight==="textbf")return"bold";let n=t.font;if(!n||n==="mathnormal")
return null;let r=e.mode;switch(n){case"mathit":return"italic";case"mathrm":{let o=e.text.codePointAt(0);return 939<o&&o<975?"italic":"normal"}case"greekItalic":
return"italic";case"up@greek":return"normal";case"boldsymbol":case"mathboldsymbol":return"bold-italic";case"mathbf":return"bold";case"mathbb":return"double-stru\
ck";case"mathfrak":return"fraktur";case"mathscr":case"mathcal":return"script";case"mathsf":return"sans-serif";case"mathsfit":return"sans-serif-italic";case"math\
tt":return"monospace"}let i=e.text;return Ee[r][i]&&Ee[r][i].replace&&(i=Ee[r][i].replace),Object.prototype.hasOwnProperty.call(Fs,n)?Fs[n]:null},Sh=/^\d(?:[\d,.]*\d)?$/,
vh=/[A-Ba-z]/,Ah=new Set(["\\prime","\\dprime","\\trprime","\\qprime","\\backprime","\\backdprime","\\backtrprime"]),Th=(e,t,n)=>{let r=new S(n,[e]),i=new S("ms\
tyle",[r]);return i.style["font-style"]="italic",i.style["font-family"]="Cambria, 'Times New Roman', serif",t==="bold-italic"&&(i.style["font-weight"]="bold"),i};
Ot({type:"mathord",mathmlBuilder(e,t){let n=He(e.text,e.mode,t),r=n.text.codePointAt(0),i=912<r&&r<938?"normal":"italic",o=bl(e,t)||i;if(o==="script")return n.text=
Kt(n.text,o),new S("mi",[n],[t.font]);o!=="italic"&&(n.text=Kt(n.text,o));let a=new S("mi",[n]);if(o==="normal"&&(a.setAttribute("mathvariant","normal"),n.text.
length===1)){let l=new S("mspace",[]);a=new S("mrow",[a,l])}return a}});Ot({type:"textord",mathmlBuilder(e,t){let n=e.text,r=n.codePointAt(0);t.fontFamily==="te\
xtsc"&&96<r&&r<123&&(n=jm[n]);let i=He(n,e.mode,t),o=bl(e,t)||"normal",a;if(Sh.test(e.text)){let l=e.mode==="text"?"mtext":"mn";if(o==="italic"||o==="bold-itali\
c")return Th(i,o,l);o!=="normal"&&(i.text=i.text.split("").map(u=>Kt(u,o)).join("")),a=new S(l,[i])}else if(e.mode==="text")o!=="normal"&&(i.text=Kt(i.text,o)),
a=new S("mtext",[i]);else if(Ah.has(e.text))a=new S("mo",[i]),a.classes.push("tml-prime");else{let l=i.text;o!=="italic"&&(i.text=Kt(i.text,o)),a=new S("mi",[i]),
i.text===l&&vh.test(l)&&a.setAttribute("mathvariant","italic")}return a}});var Nh={"\\nobreak":"nobreak","\\allowbreak":"allowbreak"},Ch={" ":{},"\\ ":{},"~":{className:"\
nobreak"},"\\space":{},"\\nobreakspace":{className:"nobreak"}};Ot({type:"spacing",mathmlBuilder(e,t){let n;if(Object.prototype.hasOwnProperty.call(Ch,e.text))n=
new S("mtext",[new Ne("\xA0")]);else if(Object.prototype.hasOwnProperty.call(Nh,e.text))n=new S("mo"),e.text==="\\nobreak"&&n.setAttribute("linebreak","nobreak");else
throw new B(`Unknown type of space "${e.text}"`);return n}});Ot({type:"tag"});var Ps={"\\text":void 0,"\\textrm":"textrm","\\textsf":"textsf","\\texttt":"texttt",
"\\textnormal":"textrm","\\textsc":"textsc"},zs={"\\textbf":"textbf","\\textmd":"textmd"},Oh={"\\textit":"textit","\\textup":"textup"},Ih=(e,t)=>{let n=e.font;if(n){
if(Ps[n])return t.withTextFontFamily(Ps[n]);if(zs[n])return t.withTextFontWeight(zs[n]);if(n==="\\emph")return t.fontShape==="textit"?t.withTextFontShape("textu\
p"):t.withTextFontShape("textit")}else return t;return t.withTextFontShape(Oh[n])};U({type:"text",names:["\\text","\\textrm","\\textsf","\\texttt","\\textnormal",
"\\textsc","\\textbf","\\textmd","\\textit","\\textup","\\emph"],props:{numArgs:1,argTypes:["text"],allowedInArgument:!0,allowedInText:!0},handler({parser:e,funcName:t},n){
let r=n[0];return{type:"text",mode:e.mode,body:Ie(r),font:t}},mathmlBuilder(e,t){let n=Ih(e,t),r=yt(e.body,n);return lr(r)}});U({type:"vcenter",names:["\\vcenter"],
props:{numArgs:1,argTypes:["original"],allowedInText:!1},handler({parser:e},t){return{type:"vcenter",mode:e.mode,body:t[0]}},mathmlBuilder(e,t){let n=new S("mtd",
[pe(e.body,t)]);n.style.padding="0";let r=new S("mtr",[n]);return new S("mtable",[r])}});U({type:"verb",names:["\\verb"],props:{numArgs:0,allowedInText:!0},handler(e,t,n){
throw new B("\\verb ended by end of line instead of matching delimiter")},mathmlBuilder(e,t){let n=new Ne(Rh(e)),r=new S("mtext",[n]);return r.setAttribute("mat\
hvariant","monospace"),r}});var Rh=e=>e.body.replace(/ /g,e.star?"\u2423":"\xA0"),Nt=Ws,xl=`[ \r
	]`,Dh="\\\\[a-zA-Z@]+",Mh="\\\\[^\uD800-\uDFFF]",Lh=`(${Dh})${xl}*`,Bh=`\\\\(
|[ \r	]+
?)[ \r	]*`,Ei="[\u0300-\u036F]",Us=new RegExp(`${Ei}+$`),qh=`(${xl}+)|${Bh}|([!-\\[\\]-\u2027\u202A-\uD7FF\uF900-\uFFFF]${Ei}*|[\uD800-\uDBFF][\uDC00-\uDFFF]${Ei}\
*|\\\\verb\\*([^]).*?\\4|\\\\verb([^*a-zA-Z]).*?\\5|${Lh}|${Mh})`,or=class{constructor(t,n){this.input=t,this.settings=n,this.tokenRegex=new RegExp(qh,"g"),this.
catcodes={"%":14,"~":13}}setCatcode(t,n){this.catcodes[t]=n}lex(){let t=this.input,n=this.tokenRegex.lastIndex;if(n===t.length)return new Ge("EOF",new ze(this,n,
n));let r=this.tokenRegex.exec(t);if(r===null||r.index!==n)throw new B(`Unexpected character: '${t[n]}'`,new Ge(t[n],new ze(this,n,n+1)));let i=r[6]||r[3]||(r[2]?
"\\ ":" ");if(this.catcodes[i]===14){let o=t.indexOf(`
`,this.tokenRegex.lastIndex);if(o===-1){if(this.tokenRegex.lastIndex=t.length,this.settings.strict)throw new B("% comment has no terminating newline; LaTeX woul\
d fail because of commenting the end of math mode")}else this.tokenRegex.lastIndex=o+1;return this.lex()}return new Ge(i,new ze(this,n,this.tokenRegex.lastIndex))}},
ki=class{constructor(t=Object.create(null),n=Object.create(null)){this.current=n,this.builtins=t,this.undefStack=[]}beginGroup(){this.undefStack.push(Object.create(
null))}endGroup(){if(this.undefStack.length===0)throw new B("Unbalanced namespace destruction: attempt to pop global namespace; please report this as a bug");let t=this.
undefStack.pop();for(let n in t)Object.prototype.hasOwnProperty.call(t,n)&&(t[n]===void 0?delete this.current[n]:this.current[n]=t[n])}has(t){return Object.prototype.
hasOwnProperty.call(this.current,t)||Object.prototype.hasOwnProperty.call(this.builtins,t)}get(t){return Object.prototype.hasOwnProperty.call(this.current,t)?this.
current[t]:this.builtins[t]}set(t,n,r=!1){if(r){for(let i=0;i<this.undefStack.length;i++)delete this.undefStack[i][t];this.undefStack.length>0&&(this.undefStack[this.
undefStack.length-1][t]=n)}else{let i=this.undefStack[this.undefStack.length-1];i&&!Object.prototype.hasOwnProperty.call(i,t)&&(i[t]=this.current[t])}this.current[t]=
n}},yl={"^":!0,_:!0,"\\limits":!0,"\\nolimits":!0},Si=class{constructor(t,n,r){this.settings=n,this.expansionCount=0,this.feed(t),this.macros=new ki(Mm,n.macros),
this.mode=r,this.stack=[]}feed(t){this.lexer=new or(t,this.settings)}switchMode(t){this.mode=t}beginGroup(){this.macros.beginGroup()}endGroup(){this.macros.endGroup()}future(){
return this.stack.length===0&&this.pushToken(this.lexer.lex()),this.stack[this.stack.length-1]}popToken(){return this.future(),this.stack.pop()}pushToken(t){this.
stack.push(t)}pushTokens(t){this.stack.push(...t)}scanArgument(t){let n,r,i;if(t){if(this.consumeSpaces(),this.future().text!=="[")return null;n=this.popToken(),
{tokens:i,end:r}=this.consumeArg(["]"])}else({tokens:i,start:n,end:r}=this.consumeArg());return this.pushToken(new Ge("EOF",r.loc)),this.pushTokens(i),new Ge("",
ze.range(n,r))}consumeSpaces(){for(;this.future().text===" ";)this.stack.pop()}consumeArg(t){let n=[],r=t&&t.length>0;r||this.consumeSpaces();let i=this.future(),
o,a=0,l=0;do{if(o=this.popToken(),n.push(o),o.text==="{")++a;else if(o.text==="}"){if(--a,a===-1)throw new B("Extra }",o)}else if(o.text==="EOF")throw new B("Un\
expected end of input in a macro argument, expected '"+(t&&r?t[l]:"}")+"'",o);if(t&&r)if((a===0||a===1&&t[l]==="{")&&o.text===t[l]){if(++l,l===t.length){n.splice(
-l,l);break}}else l=0}while(a!==0||r);return i.text==="{"&&n[n.length-1].text==="}"&&(n.pop(),n.shift()),n.reverse(),{tokens:n,start:i,end:o}}consumeArgs(t,n){if(n){
if(n.length!==t+1)throw new B("The length of delimiters doesn't match the number of args!");let i=n[0];for(let o=0;o<i.length;o++){let a=this.popToken();if(i[o]!==
a.text)throw new B("Use of the macro doesn't match its definition",a)}}let r=[];for(let i=0;i<t;i++)r.push(this.consumeArg(n&&n[i+1]).tokens);return r}expandOnce(t){
let n=this.popToken(),r=n.text,i=n.noexpand?null:this._getExpansion(r);if(i==null||t&&i.unexpandable){if(t&&i==null&&r[0]==="\\"&&!this.isDefined(r))throw new B(
"Undefined control sequence: "+r);return this.pushToken(n),!1}if(this.expansionCount++,this.expansionCount>this.settings.maxExpand)throw new B("Too many expansi\
ons: infinite loop or need to increase maxExpand setting");let o=i.tokens,a=this.consumeArgs(i.numArgs,i.delimiters);if(i.numArgs){o=o.slice();for(let l=o.length-
1;l>=0;--l){let u=o[l];if(u.text==="#"){if(l===0)throw new B("Incomplete placeholder at end of macro body",u);if(u=o[--l],u.text==="#")o.splice(l+1,1);else if(/^[1-9]$/.
test(u.text))o.splice(l,2,...a[+u.text-1]);else throw new B("Not a valid argument number",u)}}}return this.pushTokens(o),o.length}expandAfterFuture(){return this.
expandOnce(),this.future()}expandNextToken(){for(;;)if(this.expandOnce()===!1){let t=this.stack.pop();return t.treatAsRelax&&(t.text="\\relax"),t}throw new Error}expandMacro(t){
return this.macros.has(t)?this.expandTokens([new Ge(t)]):void 0}expandTokens(t){let n=[],r=this.stack.length;for(this.pushTokens(t);this.stack.length>r;)if(this.
expandOnce(!0)===!1){let i=this.stack.pop();i.treatAsRelax&&(i.noexpand=!1,i.treatAsRelax=!1),n.push(i)}return n}expandMacroAsText(t){let n=this.expandMacro(t);
return n&&n.map(r=>r.text).join("")}_getExpansion(t){let n=this.macros.get(t);if(n==null)return n;if(t.length===1){let i=this.lexer.catcodes[t];if(i!=null&&i!==
13)return}let r=typeof n=="function"?n(this):n;if(typeof r=="string"){let i=0;if(r.indexOf("#")!==-1){let d=r.replace(/##/g,"");for(;d.indexOf("#"+(i+1))!==-1;)
++i}let o=new or(r,this.settings),a=[],l=o.lex();for(;l.text!=="EOF";)a.push(l),l=o.lex();return a.reverse(),{tokens:a,numArgs:i}}return r}isDefined(t){return this.
macros.has(t)||Object.prototype.hasOwnProperty.call(Nt,t)||Object.prototype.hasOwnProperty.call(Ee.math,t)||Object.prototype.hasOwnProperty.call(Ee.text,t)||Object.
prototype.hasOwnProperty.call(yl,t)}isExpandable(t){let n=this.macros.get(t);return n!=null?typeof n=="string"||typeof n=="function"||!n.unexpandable:Object.prototype.
hasOwnProperty.call(Nt,t)&&!Nt[t].primitive}},$s=/^[₊₋₌₍₎₀₁₂₃₄₅₆₇₈₉ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ]/,
Qn=Object.freeze({"\u208A":"+","\u208B":"-","\u208C":"=","\u208D":"(","\u208E":")","\u2080":"0","\u2081":"1","\u2082":"2","\u2083":"3","\u2084":"4","\u2085":"5",
"\u2086":"6","\u2087":"7","\u2088":"8","\u2089":"9","\u2090":"a","\u2091":"e","\u2095":"h","\u1D62":"i","\u2C7C":"j","\u2096":"k","\u2097":"l","\u2098":"m","\u2099":"\
n","\u2092":"o","\u209A":"p","\u1D63":"r","\u209B":"s","\u209C":"t","\u1D64":"u","\u1D65":"v","\u2093":"x","\u1D66":"\u03B2","\u1D67":"\u03B3","\u1D68":"\u03C1",
"\u1D69":"\u03D5","\u1D6A":"\u03C7","\u207A":"+","\u207B":"-","\u207C":"=","\u207D":"(","\u207E":")","\u2070":"0","\xB9":"1","\xB2":"2","\xB3":"3","\u2074":"4",
"\u2075":"5","\u2076":"6","\u2077":"7","\u2078":"8","\u2079":"9","\u1D2C":"A","\u1D2E":"B","\u1D30":"D","\u1D31":"E","\u1D33":"G","\u1D34":"H","\u1D35":"I","\u1D36":"\
J","\u1D37":"K","\u1D38":"L","\u1D39":"M","\u1D3A":"N","\u1D3C":"O","\u1D3E":"P","\u1D3F":"R","\u1D40":"T","\u1D41":"U","\u2C7D":"V","\u1D42":"W","\u1D43":"a","\
\u1D47":"b","\u1D9C":"c","\u1D48":"d","\u1D49":"e","\u1DA0":"f","\u1D4D":"g",\u02B0:"h","\u2071":"i",\u02B2:"j","\u1D4F":"k",\u02E1:"l","\u1D50":"m",\u207F:"n",
"\u1D52":"o","\u1D56":"p",\u02B3:"r",\u02E2:"s","\u1D57":"t","\u1D58":"u","\u1D5B":"v",\u02B7:"w",\u02E3:"x",\u02B8:"y","\u1DBB":"z","\u1D5D":"\u03B2","\u1D5E":"\
\u03B3","\u1D5F":"\u03B4","\u1D60":"\u03D5","\u1D61":"\u03C7","\u1DBF":"\u03B8"}),Gs=Object.freeze({"\u{1D49C}":"A",\u212C:"B","\u{1D49E}":"C","\u{1D49F}":"D",\u2130:"\
E",\u2131:"F","\u{1D4A2}":"G",\u210B:"H",\u2110:"I","\u{1D4A5}":"J","\u{1D4A6}":"K",\u2112:"L",\u2133:"M","\u{1D4A9}":"N","\u{1D4AA}":"O","\u{1D4AB}":"P","\u{1D4AC}":"\
Q",\u211B:"R","\u{1D4AE}":"S","\u{1D4AF}":"T","\u{1D4B0}":"U","\u{1D4B1}":"V","\u{1D4B2}":"W","\u{1D4B3}":"X","\u{1D4B4}":"Y","\u{1D4B5}":"Z"}),mi={"\u0301":{text:"\
\\'",math:"\\acute"},"\u0300":{text:"\\`",math:"\\grave"},"\u0308":{text:'\\"',math:"\\ddot"},"\u0303":{text:"\\~",math:"\\tilde"},"\u0304":{text:"\\=",math:"\\b\
ar"},"\u0306":{text:"\\u",math:"\\breve"},"\u030C":{text:"\\v",math:"\\check"},"\u0302":{text:"\\^",math:"\\hat"},"\u0307":{text:"\\.",math:"\\dot"},"\u030A":{text:"\
\\r",math:"\\mathring"},"\u030B":{text:"\\H"},"\u0327":{text:"\\c"}},Hs={\u00E1:"a\u0301",\u00E0:"a\u0300",\u00E4:"a\u0308",\u01DF:"a\u0308\u0304",\u00E3:"a\u0303",
\u0101:"a\u0304",\u0103:"a\u0306",\u1EAF:"a\u0306\u0301",\u1EB1:"a\u0306\u0300",\u1EB5:"a\u0306\u0303",\u01CE:"a\u030C",\u00E2:"a\u0302",\u1EA5:"a\u0302\u0301",
\u1EA7:"a\u0302\u0300",\u1EAB:"a\u0302\u0303",\u0227:"a\u0307",\u01E1:"a\u0307\u0304",\u00E5:"a\u030A",\u01FB:"a\u030A\u0301",\u1E03:"b\u0307",\u0107:"c\u0301",
\u010D:"c\u030C",\u0109:"c\u0302",\u010B:"c\u0307",\u010F:"d\u030C",\u1E0B:"d\u0307",\u00E9:"e\u0301",\u00E8:"e\u0300",\u00EB:"e\u0308",\u1EBD:"e\u0303",\u0113:"\
e\u0304",\u1E17:"e\u0304\u0301",\u1E15:"e\u0304\u0300",\u0115:"e\u0306",\u011B:"e\u030C",\u00EA:"e\u0302",\u1EBF:"e\u0302\u0301",\u1EC1:"e\u0302\u0300",\u1EC5:"\
e\u0302\u0303",\u0117:"e\u0307",\u1E1F:"f\u0307",\u01F5:"g\u0301",\u1E21:"g\u0304",\u011F:"g\u0306",\u01E7:"g\u030C",\u011D:"g\u0302",\u0121:"g\u0307",\u1E27:"h\
\u0308",\u021F:"h\u030C",\u0125:"h\u0302",\u1E23:"h\u0307",\u00ED:"i\u0301",\u00EC:"i\u0300",\u00EF:"i\u0308",\u1E2F:"i\u0308\u0301",\u0129:"i\u0303",\u012B:"i\u0304",
\u012D:"i\u0306",\u01D0:"i\u030C",\u00EE:"i\u0302",\u01F0:"j\u030C",\u0135:"j\u0302",\u1E31:"k\u0301",\u01E9:"k\u030C",\u013A:"l\u0301",\u013E:"l\u030C",\u1E3F:"\
m\u0301",\u1E41:"m\u0307",\u0144:"n\u0301",\u01F9:"n\u0300",\u00F1:"n\u0303",\u0148:"n\u030C",\u1E45:"n\u0307",\u00F3:"o\u0301",\u00F2:"o\u0300",\u00F6:"o\u0308",
\u022B:"o\u0308\u0304",\u00F5:"o\u0303",\u1E4D:"o\u0303\u0301",\u1E4F:"o\u0303\u0308",\u022D:"o\u0303\u0304",\u014D:"o\u0304",\u1E53:"o\u0304\u0301",\u1E51:"o\u0304\u0300",
\u014F:"o\u0306",\u01D2:"o\u030C",\u00F4:"o\u0302",\u1ED1:"o\u0302\u0301",\u1ED3:"o\u0302\u0300",\u1ED7:"o\u0302\u0303",\u022F:"o\u0307",\u0231:"o\u0307\u0304",
\u0151:"o\u030B",\u1E55:"p\u0301",\u1E57:"p\u0307",\u0155:"r\u0301",\u0159:"r\u030C",\u1E59:"r\u0307",\u015B:"s\u0301",\u1E65:"s\u0301\u0307",\u0161:"s\u030C",\u1E67:"\
s\u030C\u0307",\u015D:"s\u0302",\u1E61:"s\u0307",\u1E97:"t\u0308",\u0165:"t\u030C",\u1E6B:"t\u0307",\u00FA:"u\u0301",\u00F9:"u\u0300",\u00FC:"u\u0308",\u01D8:"u\
\u0308\u0301",\u01DC:"u\u0308\u0300",\u01D6:"u\u0308\u0304",\u01DA:"u\u0308\u030C",\u0169:"u\u0303",\u1E79:"u\u0303\u0301",\u016B:"u\u0304",\u1E7B:"u\u0304\u0308",
\u016D:"u\u0306",\u01D4:"u\u030C",\u00FB:"u\u0302",\u016F:"u\u030A",\u0171:"u\u030B",\u1E7D:"v\u0303",\u1E83:"w\u0301",\u1E81:"w\u0300",\u1E85:"w\u0308",\u0175:"\
w\u0302",\u1E87:"w\u0307",\u1E98:"w\u030A",\u1E8D:"x\u0308",\u1E8B:"x\u0307",\u00FD:"y\u0301",\u1EF3:"y\u0300",\u00FF:"y\u0308",\u1EF9:"y\u0303",\u0233:"y\u0304",
\u0177:"y\u0302",\u1E8F:"y\u0307",\u1E99:"y\u030A",\u017A:"z\u0301",\u017E:"z\u030C",\u1E91:"z\u0302",\u017C:"z\u0307",\u00C1:"A\u0301",\u00C0:"A\u0300",\u00C4:"\
A\u0308",\u01DE:"A\u0308\u0304",\u00C3:"A\u0303",\u0100:"A\u0304",\u0102:"A\u0306",\u1EAE:"A\u0306\u0301",\u1EB0:"A\u0306\u0300",\u1EB4:"A\u0306\u0303",\u01CD:"\
A\u030C",\u00C2:"A\u0302",\u1EA4:"A\u0302\u0301",\u1EA6:"A\u0302\u0300",\u1EAA:"A\u0302\u0303",\u0226:"A\u0307",\u01E0:"A\u0307\u0304",\u00C5:"A\u030A",\u01FA:"\
A\u030A\u0301",\u1E02:"B\u0307",\u0106:"C\u0301",\u010C:"C\u030C",\u0108:"C\u0302",\u010A:"C\u0307",\u010E:"D\u030C",\u1E0A:"D\u0307",\u00C9:"E\u0301",\u00C8:"E\
\u0300",\u00CB:"E\u0308",\u1EBC:"E\u0303",\u0112:"E\u0304",\u1E16:"E\u0304\u0301",\u1E14:"E\u0304\u0300",\u0114:"E\u0306",\u011A:"E\u030C",\u00CA:"E\u0302",\u1EBE:"\
E\u0302\u0301",\u1EC0:"E\u0302\u0300",\u1EC4:"E\u0302\u0303",\u0116:"E\u0307",\u1E1E:"F\u0307",\u01F4:"G\u0301",\u1E20:"G\u0304",\u011E:"G\u0306",\u01E6:"G\u030C",
\u011C:"G\u0302",\u0120:"G\u0307",\u1E26:"H\u0308",\u021E:"H\u030C",\u0124:"H\u0302",\u1E22:"H\u0307",\u00CD:"I\u0301",\u00CC:"I\u0300",\u00CF:"I\u0308",\u1E2E:"\
I\u0308\u0301",\u0128:"I\u0303",\u012A:"I\u0304",\u012C:"I\u0306",\u01CF:"I\u030C",\u00CE:"I\u0302",\u0130:"I\u0307",\u0134:"J\u0302",\u1E30:"K\u0301",\u01E8:"K\
\u030C",\u0139:"L\u0301",\u013D:"L\u030C",\u1E3E:"M\u0301",\u1E40:"M\u0307",\u0143:"N\u0301",\u01F8:"N\u0300",\u00D1:"N\u0303",\u0147:"N\u030C",\u1E44:"N\u0307",
\u00D3:"O\u0301",\u00D2:"O\u0300",\u00D6:"O\u0308",\u022A:"O\u0308\u0304",\u00D5:"O\u0303",\u1E4C:"O\u0303\u0301",\u1E4E:"O\u0303\u0308",\u022C:"O\u0303\u0304",
\u014C:"O\u0304",\u1E52:"O\u0304\u0301",\u1E50:"O\u0304\u0300",\u014E:"O\u0306",\u01D1:"O\u030C",\u00D4:"O\u0302",\u1ED0:"O\u0302\u0301",\u1ED2:"O\u0302\u0300",
\u1ED6:"O\u0302\u0303",\u022E:"O\u0307",\u0230:"O\u0307\u0304",\u0150:"O\u030B",\u1E54:"P\u0301",\u1E56:"P\u0307",\u0154:"R\u0301",\u0158:"R\u030C",\u1E58:"R\u0307",
\u015A:"S\u0301",\u1E64:"S\u0301\u0307",\u0160:"S\u030C",\u1E66:"S\u030C\u0307",\u015C:"S\u0302",\u1E60:"S\u0307",\u0164:"T\u030C",\u1E6A:"T\u0307",\u00DA:"U\u0301",
\u00D9:"U\u0300",\u00DC:"U\u0308",\u01D7:"U\u0308\u0301",\u01DB:"U\u0308\u0300",\u01D5:"U\u0308\u0304",\u01D9:"U\u0308\u030C",\u0168:"U\u0303",\u1E78:"U\u0303\u0301",
\u016A:"U\u0304",\u1E7A:"U\u0304\u0308",\u016C:"U\u0306",\u01D3:"U\u030C",\u00DB:"U\u0302",\u016E:"U\u030A",\u0170:"U\u030B",\u1E7C:"V\u0303",\u1E82:"W\u0301",\u1E80:"\
W\u0300",\u1E84:"W\u0308",\u0174:"W\u0302",\u1E86:"W\u0307",\u1E8C:"X\u0308",\u1E8A:"X\u0307",\u00DD:"Y\u0301",\u1EF2:"Y\u0300",\u0178:"Y\u0308",\u1EF8:"Y\u0303",
\u0232:"Y\u0304",\u0176:"Y\u0302",\u1E8E:"Y\u0307",\u0179:"Z\u0301",\u017D:"Z\u030C",\u1E90:"Z\u0302",\u017B:"Z\u0307",\u03AC:"\u03B1\u0301",\u1F70:"\u03B1\u0300",
\u1FB1:"\u03B1\u0304",\u1FB0:"\u03B1\u0306",\u03AD:"\u03B5\u0301",\u1F72:"\u03B5\u0300",\u03AE:"\u03B7\u0301",\u1F74:"\u03B7\u0300",\u03AF:"\u03B9\u0301",\u1F76:"\
\u03B9\u0300",\u03CA:"\u03B9\u0308",\u0390:"\u03B9\u0308\u0301",\u1FD2:"\u03B9\u0308\u0300",\u1FD1:"\u03B9\u0304",\u1FD0:"\u03B9\u0306",\u03CC:"\u03BF\u0301",\u1F78:"\
\u03BF\u0300",\u03CD:"\u03C5\u0301",\u1F7A:"\u03C5\u0300",\u03CB:"\u03C5\u0308",\u03B0:"\u03C5\u0308\u0301",\u1FE2:"\u03C5\u0308\u0300",\u1FE1:"\u03C5\u0304",\u1FE0:"\
\u03C5\u0306",\u03CE:"\u03C9\u0301",\u1F7C:"\u03C9\u0300",\u038E:"\u03A5\u0301",\u1FEA:"\u03A5\u0300",\u03AB:"\u03A5\u0308",\u1FE9:"\u03A5\u0304",\u1FE8:"\u03A5\u0306",
\u038F:"\u03A9\u0301",\u1FFA:"\u03A9\u0300"},Fh=["bin","op","open","punct","rel"],Ph=/([-+]?) *(\d+(?:\.\d*)?|\.\d+) *([a-z]{2})/,zh=/^ *\\text/,gn=class e{constructor(t,n,r=!1){
this.mode="math",this.gullet=new Si(t,n,this.mode),this.settings=n,this.isPreamble=r,this.leftrightDepth=0,this.prevAtomType=""}expect(t,n=!0){if(this.fetch().text!==
t)throw new B(`Expected '${t}', got '${this.fetch().text}'`,this.fetch());n&&this.consume()}consume(){this.nextToken=null}fetch(){return this.nextToken==null&&(this.
nextToken=this.gullet.expandNextToken()),this.nextToken}switchMode(t){this.mode=t,this.gullet.switchMode(t)}parse(){this.gullet.beginGroup(),this.settings.colorIsTextColor&&
this.gullet.macros.set("\\color","\\textcolor");let t=this.parseExpression(!1);if(this.expect("EOF"),this.isPreamble){let r=Object.create(null);return Object.entries(
this.gullet.macros.current).forEach(([i,o])=>{r[i]=o}),this.gullet.endGroup(),r}let n=this.gullet.macros.get("\\df@tag");return this.gullet.endGroup(),n&&(this.
gullet.macros.current["\\df@tag"]=n),t}static get endOfExpression(){return["}","\\endgroup","\\end","\\right","\\endtoggle","&"]}subparse(t){let n=this.nextToken;
this.consume(),this.gullet.pushToken(new Ge("}")),this.gullet.pushTokens(t);let r=this.parseExpression(!1);return this.expect("}"),this.nextToken=n,r}parseExpression(t,n,r){
let i=[];for(this.prevAtomType="";;){this.mode==="math"&&this.consumeSpaces();let o=this.fetch();if(e.endOfExpression.indexOf(o.text)!==-1||n&&o.text===n||r&&o.
text==="\\middle"||t&&Nt[o.text]&&Nt[o.text].infix)break;let a=this.parseAtom(n);if(a){if(a.type==="internal")continue}else break;i.push(a),this.prevAtomType=a.
type==="atom"?a.family:a.type}return this.mode==="text"&&this.formLigatures(i),this.handleInfixNodes(i)}handleInfixNodes(t){let n=-1,r;for(let i=0;i<t.length;i++)
if(t[i].type==="infix"){if(n!==-1)throw new B("only one infix operator per group",t[i].token);n=i,r=t[i].replaceWith}if(n!==-1&&r){let i,o,a=t.slice(0,n),l=t.slice(
n+1);a.length===1&&a[0].type==="ordgroup"?i=a[0]:i={type:"ordgroup",mode:this.mode,body:a},l.length===1&&l[0].type==="ordgroup"?o=l[0]:o={type:"ordgroup",mode:this.
mode,body:l};let u;return r==="\\\\abovefrac"?u=this.callFunction(r,[i,t[n],o],[]):u=this.callFunction(r,[i,o],[]),[u]}else return t}handleSupSubscript(t){let n=this.
fetch(),r=n.text;this.consume(),this.consumeSpaces();let i;do i=this.parseGroup(t);while(i.type&&i.type==="internal");if(!i)throw new B("Expected group after '"+
r+"'",n);return i}formatUnsupportedCmd(t){let n=[];for(let o=0;o<t.length;o++)n.push({type:"textord",mode:"text",text:t[o]});let r={type:"text",mode:this.mode,body:n};
return{type:"color",mode:this.mode,color:this.settings.errorColor,body:[r]}}parseAtom(t){let n=this.parseGroup("atom",t);if(n&&n.type==="internal"||this.mode===
"text")return n;let r,i;for(;;){this.consumeSpaces();let o=this.fetch();if(o.text==="\\limits"||o.text==="\\nolimits"){if(n&&n.type==="op"){let a=o.text==="\\lim\
its";n.limits=a,n.alwaysHandleSupSub=!0}else if(n&&n.type==="operatorname")n.alwaysHandleSupSub&&(n.limits=o.text==="\\limits");else throw new B("Limit controls\
 must follow a math operator",o);this.consume()}else if(o.text==="^"){if(r)throw new B("Double superscript",o);r=this.handleSupSubscript("superscript")}else if(o.
text==="_"){if(i)throw new B("Double subscript",o);i=this.handleSupSubscript("subscript")}else if(o.text==="'"){if(r)throw new B("Double superscript",o);let a={
type:"textord",mode:this.mode,text:"\\prime"},l=[a];for(this.consume();this.fetch().text==="'";)l.push(a),this.consume();this.fetch().text==="^"&&l.push(this.handleSupSubscript(
"superscript")),r={type:"ordgroup",mode:this.mode,body:l}}else if(Qn[o.text]){let a=$s.test(o.text),l=[];for(l.push(new Ge(Qn[o.text])),this.consume();;){let d=this.
fetch().text;if(!Qn[d]||$s.test(d)!==a)break;l.unshift(new Ge(Qn[d])),this.consume()}let u=this.subparse(l);a?i={type:"ordgroup",mode:"math",body:u}:r={type:"or\
dgroup",mode:"math",body:u}}else break}if(r||i){if(n&&n.type==="multiscript"&&!n.postscripts)return n.postscripts={sup:r,sub:i},n;{let o=!n||n.type!=="op"&&n.type!==
"operatorname"?void 0:ur(this.nextToken.text);return{type:"supsub",mode:this.mode,base:n,sup:r,sub:i,isFollowedByDelimiter:o}}}else return n}parseFunction(t,n){
let r=this.fetch(),i=r.text,o=Nt[i];if(!o)return null;if(this.consume(),n&&n!=="atom"&&!o.allowedInArgument)throw new B("Got function '"+i+"' with no arguments"+
(n?" as "+n:""),r);if(this.mode==="text"&&!o.allowedInText)throw new B("Can't use function '"+i+"' in text mode",r);if(this.mode==="math"&&o.allowedInMath===!1)
throw new B("Can't use function '"+i+"' in math mode",r);let a=this.prevAtomType,{args:l,optArgs:u}=this.parseArguments(i,o);return this.prevAtomType=a,this.callFunction(
i,l,u,r,t)}callFunction(t,n,r,i,o){let a={funcName:t,parser:this,token:i,breakOnTokenText:o},l=Nt[t];if(l&&l.handler)return l.handler(a,n,r);throw new B(`No fun\
ction handler for ${t}`)}parseArguments(t,n){let r=n.numArgs+n.numOptionalArgs;if(r===0)return{args:[],optArgs:[]};let i=[],o=[];for(let a=0;a<r;a++){let l=n.argTypes&&
n.argTypes[a],u=a<n.numOptionalArgs;(n.primitive&&l==null||n.type==="sqrt"&&a===1&&o[0]==null)&&(l="primitive");let d=this.parseGroupOfType(`argument to '${t}'`,
l,u);if(u)o.push(d);else if(d!=null)i.push(d);else throw new B("Null argument, please report this as a bug")}return{args:i,optArgs:o}}parseGroupOfType(t,n,r){switch(n){case"\
size":return this.parseSizeGroup(r);case"url":return this.parseUrlGroup(r);case"math":case"text":return this.parseArgumentGroup(r,n);case"hbox":{let i=this.parseArgumentGroup(
r,"text");return i!=null?{type:"styling",mode:i.mode,body:[i],scriptLevel:"text"}:null}case"raw":{let i=this.parseStringGroup("raw",r);return i!=null?{type:"raw",
mode:"text",string:i.text}:null}case"primitive":{if(r)throw new B("A primitive argument cannot be optional");let i=this.parseGroup(t);if(i==null)throw new B("Ex\
pected group as "+t,this.fetch());return i}case"original":case null:case void 0:return this.parseArgumentGroup(r);default:throw new B("Unknown group type as "+t,
this.fetch())}}consumeSpaces(){for(;;){let t=this.fetch().text;if(t===" "||t==="\xA0"||t==="\uFE0E")this.consume();else break}}parseStringGroup(t,n){let r=this.
gullet.scanArgument(n);if(r==null)return null;let i="",o;for(;(o=this.fetch()).text!=="EOF";)i+=o.text,this.consume();return this.consume(),r.text=i,r}parseRegexGroup(t,n){
let r=this.fetch(),i=r,o="",a;for(;(a=this.fetch()).text!=="EOF"&&t.test(o+a.text);)i=a,o+=i.text,this.consume();if(o==="")throw new B("Invalid "+n+": '"+r.text+
"'",r);return r.range(i,o)}parseSizeGroup(t){let n,r=!1;if(this.gullet.consumeSpaces(),!t&&this.gullet.future().text!=="{"?n=this.parseRegexGroup(/^[-+]? *(?:$|\d+|\d+\.\d*|\.\d*) *[a-z]{0,2} *$/,
"size"):n=this.parseStringGroup("size",t),!n)return null;!t&&n.text.length===0&&(n.text="0pt",r=!0);let i=Ph.exec(n.text);if(!i)throw new B("Invalid size: '"+n.
text+"'",n);let o={number:+(i[1]+i[2]),unit:i[3]};if(!Ys(o))throw new B("Invalid unit: '"+o.unit+"'",n);return{type:"size",mode:this.mode,value:o,isBlank:r}}parseUrlGroup(t){
this.gullet.lexer.setCatcode("%",13),this.gullet.lexer.setCatcode("~",12);let n=this.parseStringGroup("url",t);if(this.gullet.lexer.setCatcode("%",14),this.gullet.
lexer.setCatcode("~",13),n==null)return null;let r=n.text.replace(/\\([#$%&~_^{}])/g,"$1");return r=n.text.replace(/{\u2044}/g,"/"),{type:"url",mode:this.mode,url:r}}parseArgumentGroup(t,n){
let r=this.gullet.scanArgument(t);if(r==null)return null;let i=this.mode;n&&this.switchMode(n),this.gullet.beginGroup();let o=this.parseExpression(!1,"EOF");this.
expect("EOF"),this.gullet.endGroup();let a={type:"ordgroup",mode:this.mode,loc:r.loc,body:o};return n&&this.switchMode(i),a}parseGroup(t,n){let r=this.fetch(),i=r.
text;if(t==="argument to '\\left'")return this.parseSymbol();let o;if(i==="{"||i==="\\begingroup"||i==="\\toggle"){this.consume();let a=i==="{"?"}":i==="\\beging\
roup"?"\\endgroup":"\\endtoggle";this.gullet.beginGroup();let l=this.parseExpression(!1,a),u=this.fetch();this.expect(a),this.gullet.endGroup(),o={type:u.text===
"\\endtoggle"?"toggle":"ordgroup",mode:this.mode,loc:ze.range(r,u),body:l,semisimple:i==="\\begingroup"||void 0}}else if(o=this.parseFunction(n,t)||this.parseSymbol(),
o==null&&i[0]==="\\"&&!Object.prototype.hasOwnProperty.call(yl,i)){if(this.settings.throwOnError)throw new B("Unsupported function name: "+i,r);o=this.formatUnsupportedCmd(
i),this.consume()}return o}formLigatures(t){let n=t.length-1;for(let r=0;r<n;++r){let i=t[r],o=i.text;o==="-"&&t[r+1].text==="-"&&(r+1<n&&t[r+2].text==="-"?(t.splice(
r,3,{type:"textord",mode:"text",loc:ze.range(i,t[r+2]),text:"---"}),n-=2):(t.splice(r,2,{type:"textord",mode:"text",loc:ze.range(i,t[r+1]),text:"--"}),n-=1)),(o===
"'"||o==="`")&&t[r+1].text===o&&(t.splice(r,2,{type:"textord",mode:"text",loc:ze.range(i,t[r+1]),text:o+o}),n-=1)}}parseSymbol(){let t=this.fetch(),n=t.text;if(/^\\verb[^a-zA-Z]/.
test(n)){this.consume();let o=n.slice(5),a=o.charAt(0)==="*";if(a&&(o=o.slice(1)),o.length<2||o.charAt(0)!==o.slice(-1))throw new B(`\\verb assertion failed --
                    please report what input caused this bug`);return o=o.slice(1,-1),{type:"verb",mode:"text",body:o,star:a}}if(Object.prototype.hasOwnProperty.
call(Hs,n[0])&&this.mode==="math"&&!Ee[this.mode][n[0]]){if(this.settings.strict&&this.mode==="math")throw new B(`Accented Unicode text character "${n[0]}" used\
 in math mode`,t);n=Hs[n[0]]+n.slice(1)}let r=this.mode==="math"?Us.exec(n):null;r&&(n=n.substring(0,r.index),n==="i"?n="\u0131":n==="j"&&(n="\u0237"));let i;if(Ee[this.
mode][n]){let o=Ee[this.mode][n].group;o==="bin"&&(Fh.includes(this.prevAtomType)||this.prevAtomType==="")&&(o="open");let a=ze.range(t),l;if(Object.prototype.hasOwnProperty.
call(fm,o)){let u=o;l={type:"atom",mode:this.mode,family:u,loc:a,text:n},(u==="rel"||u==="bin")&&this.prevAtomType==="text"&&zh.test(a.lexer.input.slice(a.end))&&
(l.needsSpacing=!0)}else{if(Gs[n]){this.consume();let u=this.fetch().text.charCodeAt(0),d=u===65025?"mathscr":"mathcal";return(u===65024||u===65025)&&this.consume(),
{type:"font",mode:"math",font:d,body:{type:"mathord",mode:"math",loc:a,text:Gs[n]}}}l={type:o,mode:this.mode,loc:a,text:n}}i=l}else if(n.charCodeAt(0)>=128||Us.
exec(n)){if(this.settings.strict&&this.mode==="math")throw new B(`Unicode text character "${n[0]}" used in math mode`,t);i={type:"textord",mode:"text",loc:ze.range(
t),text:n}}else return null;if(this.consume(),r)for(let o=0;o<r[0].length;o++){let a=r[0][o];if(!mi[a])throw new B(`Unknown accent ' ${a}'`,t);let l=mi[a][this.
mode]||mi[a].text;if(!l)throw new B(`Accent ${a} unsupported in ${this.mode} mode`,t);i={type:"accent",mode:this.mode,loc:ze.range(t),label:l,isStretchy:!1,base:i}}
return i}},wl=function(e,t){if(!(typeof e=="string"||e instanceof String))throw new TypeError("Temml can only parse string typed expression");let n,r;try{r=new gn(
e,t),delete r.gullet.macros.current["\\df@tag"],n=r.parse()}catch(i){if(i.toString()==="ParseError:  Unmatched delimiter")t.wrapDelimiterPairs=!1,r=new gn(e,t),
delete r.gullet.macros.current["\\df@tag"],n=r.parse();else throw i}if(!(n.length>0&&n[0].type&&n[0].type==="array"&&n[0].addEqnNum)&&r.gullet.macros.get("\\df@t\
ag")){if(!t.displayMode)throw new B("\\tag works only in display mode");r.gullet.feed("\\df@tag"),n=[{type:"tag",mode:"text",body:n,tag:r.parse()}]}return n},Uh=[
2,2,3,3],vi=class e{constructor(t){this.level=t.level,this.color=t.color,this.font=t.font||"",this.fontFamily=t.fontFamily||"",this.fontSize=t.fontSize||1,this.
fontWeight=t.fontWeight||"",this.fontShape=t.fontShape||"",this.maxSize=t.maxSize}extend(t){let n={level:this.level,color:this.color,font:this.font,fontFamily:this.
fontFamily,fontSize:this.fontSize,fontWeight:this.fontWeight,fontShape:this.fontShape,maxSize:this.maxSize};for(let r in t)Object.prototype.hasOwnProperty.call(
t,r)&&(n[r]=t[r]);return new e(n)}withLevel(t){return this.extend({level:t})}incrementLevel(){return this.extend({level:Math.min(this.level+1,3)})}inSubOrSup(){
return this.extend({level:Uh[this.level]})}withColor(t){return this.extend({color:t})}withFont(t){return this.extend({font:t})}withTextFontFamily(t){return this.
extend({fontFamily:t,font:""})}withFontSize(t){return this.extend({fontSize:t})}withTextFontWeight(t){return this.extend({fontWeight:t,font:""})}withTextFontShape(t){
return this.extend({fontShape:t,font:""})}getColor(){return this.color}},$h="0.13.5";function _l(e){let t={},n=0,r=document.getElementsByClassName("tml-eqn");for(let a of r)
for(n+=1,a.setAttribute("id","tml-eqn-"+String(n));a.tagName!=="mtable";)if(a.getElementsByClassName("tml-label").length>0){let u=a.attributes.id.value;t[u]=String(
n);break}else a=a.parentElement;let i=document.getElementsByClassName("tml-tageqn");for(let a of i)if(a.getElementsByClassName("tml-label").length>0){let u=a.getElementsByClassName(
"tml-tag");if(u.length>0){let d=a.attributes.id.value;t[d]=u[0].textContent}}[...e.getElementsByClassName("tml-ref")].forEach(a=>{let l=a.getAttribute("href"),u=t[l.
slice(1)];a.className.indexOf("tml-eqref")===-1?(u=u.replace(/^\(/,""),u=u.replace(/\)$/,"")):(u.charAt(0)!=="("&&(u="("+u),u.slice(-1)!==")"&&(u=u+")"));let d=document.
createElementNS("http://www.w3.org/1998/Math/MathML","mtext");d.appendChild(document.createTextNode(u));let p=document.createElementNS("http://www.w3.org/1998/M\
ath/MathML","math");p.appendChild(d),a.textContent="",a.appendChild(p)})}var Gh=function(e,t,n){let r=n,i=0,o=e.length;for(;r<t.length;){let a=t[r];if(i<=0&&t.slice(
r,r+o)===e)return r;a==="\\"?r++:a==="{"?i++:a==="}"&&i--,r++}return-1},Hh=function(e){return e.replace(/[-/\\^$*+?.()|[\]{}]/g,"\\$&")},Kh=/^\\(?:begin|(?:eq)?ref){/,
Wh=function(e,t){let n,r=[],i=new RegExp("("+t.map(o=>Hh(o.left)).join("|")+")");for(;n=e.search(i),n!==-1;){n>0&&(r.push({type:"text",data:e.slice(0,n)}),e=e.slice(
n));let o=t.findIndex(u=>e.startsWith(u.left));if(n=Gh(t[o].right,e,t[o].left.length),n===-1)break;let a=e.slice(0,n+t[o].right.length),l=Kh.test(a)?a:e.slice(t[o].
left.length,n);r.push({type:"math",data:l,rawData:a,display:t[o].display}),e=e.slice(n+t[o].right.length)}return e!==""&&r.push({type:"text",data:e}),r},El=[{left:"\
$$",right:"$$",display:!0},{left:"\\(",right:"\\)",display:!1},{left:"\\begin{equation}",right:"\\end{equation}",display:!0},{left:"\\begin{equation*}",right:"\\\
end{equation*}",display:!0},{left:"\\begin{align}",right:"\\end{align}",display:!0},{left:"\\begin{align*}",right:"\\end{align*}",display:!0},{left:"\\begin{alig\
nat}",right:"\\end{alignat}",display:!0},{left:"\\begin{alignat*}",right:"\\end{alignat*}",display:!0},{left:"\\begin{gather}",right:"\\end{gather}",display:!0},
{left:"\\begin{gather*}",right:"\\end{gather*}",display:!0},{left:"\\begin{CD}",right:"\\end{CD}",display:!0},{left:"\\ref{",right:"}",display:!1},{left:"\\eqref\
{",right:"}",display:!1},{left:"\\[",right:"\\]",display:!0}],jn={$:[{left:"$$",right:"$$",display:!0},{left:"$`",right:"`$",display:!1},{left:"$",right:"$",display:!1}],
"(":[{left:"\\[",right:"\\]",display:!0},{left:"\\(",right:"\\)",display:!1}]},hi=[{left:"\\begin{equation}",right:"\\end{equation}",display:!0},{left:"\\begin{e\
quation*}",right:"\\end{equation*}",display:!0},{left:"\\begin{align}",right:"\\end{align}",display:!0},{left:"\\begin{align*}",right:"\\end{align*}",display:!0},
{left:"\\begin{alignat}",right:"\\end{alignat}",display:!0},{left:"\\begin{alignat*}",right:"\\end{alignat*}",display:!0},{left:"\\begin{gather}",right:"\\end{ga\
ther}",display:!0},{left:"\\begin{gather*}",right:"\\end{gather*}",display:!0},{left:"\\begin{CD}",right:"\\end{CD}",display:!0},{left:"\\ref{",right:"}",display:!1},
{left:"\\eqref{",right:"}",display:!1}],Vh=e=>e==="$"||e==="("?jn[e]:e==="$+"||e==="(+"?jn[e.slice(0,1)].concat(hi):e==="ams"?hi:e==="all"?jn["("].concat(jn.$).
concat(hi):El,Zh=function(e,t){let n=Wh(e,t.delimiters);if(n.length===1&&n[0].type==="text")return null;let r=document.createDocumentFragment();for(let i=0;i<n.
length;i++)if(n[i].type==="text")r.appendChild(document.createTextNode(n[i].data));else{let o=document.createElement("span"),a=n[i].data;t.displayMode=n[i].display;
try{t.preProcess&&(a=t.preProcess(a)),temml.render(a,o,t)}catch(l){if(!(l instanceof B))throw l;t.errorCallback("Temml auto-render: Failed to parse `"+n[i].data+
"` with ",l),r.appendChild(document.createTextNode(n[i].rawData));continue}r.appendChild(o)}return r},kl=function(e,t){for(let n=0;n<e.childNodes.length;n++){let r=e.
childNodes[n];if(r.nodeType===3){let i=Zh(r.textContent,t);i&&(n+=i.childNodes.length-1,e.replaceChild(i,r))}else if(r.nodeType===1){let i=" "+r.className+" ";t.
ignoredTags.indexOf(r.nodeName.toLowerCase())===-1&&t.ignoredClasses.every(a=>i.indexOf(" "+a+" ")===-1)&&kl(r,t)}}},Yh=function(e,t){if(!e)throw new Error("No \
element provided to render");let n={};for(let r in t)Object.prototype.hasOwnProperty.call(t,r)&&(n[r]=t[r]);n.fences?n.delimiters=Vh(n.fences):n.delimiters=n.delimiters||
El,n.ignoredTags=n.ignoredTags||["script","noscript","style","textarea","pre","code","option"],n.ignoredClasses=n.ignoredClasses||[],n.errorCallback=n.errorCallback||
console.error,n.macros=n.macros||Object.create(null),kl(e,n),_l(e)},Sl=function(e,t,n={}){t.textContent="";let r=t.tagName.toLowerCase()==="math";r&&(n.wrap="no\
ne");let i=qi(e,n);r?(t.textContent="",i.children.forEach(o=>{t.appendChild(o.toNode())})):i.children.length>1?(t.textContent="",i.children.forEach(o=>{t.appendChild(
o.toNode())})):t.appendChild(i.toNode())};typeof document<"u"&&document.compatMode!=="CSS1Compat"&&(typeof console<"u"&&console.warn("Warning: Temml doesn't wor\
k in quirks mode. Make sure your website has a suitable doctype."),Sl=function(){throw new B("Temml doesn't work in quirks mode.")});var Xh=function(e,t){return qi(
e,t).toMarkup()},Qh=function(e,t){let n=new dn(t);return wl(e,n)},jh=function(e,t){let n=new dn(t);if(n.macros=Object.create(null),!(typeof e=="string"||e instanceof
String))throw new TypeError("Temml can only parse string typed expression");let r=new gn(e,n,!0);return delete r.gullet.macros.current["\\df@tag"],r.parse()},Jh=function(e,t,n){
if(n.throwOnError||!(e instanceof B))throw e;let r=new tr(["temml-error"],[new pm(t+`

`+e.toString())]);return r.style.color=n.errorColor,r.style.whiteSpace="pre-line",r},qi=function(e,t){let n=new dn(t);try{let r=wl(e,n),i=new vi({level:n.displayMode?
we.DISPLAY:we.TEXT,maxSize:n.maxSize});return Em(r,e,i,n)}catch(r){return Jh(r,e,n)}},ef={version:$h,render:Sl,renderToString:Xh,renderMathInElement:Yh,postProcess:_l,
ParseError:B,definePreamble:jh,__parse:Qh,__renderToMathMLTree:qi,__defineSymbol:s,__defineMacro:g};export{Ha as common,fo as createLowlight,Uo as fromMarkdown,Qp as gfm,Yo as gfmFromMarkdown,us as math,Xo as mathFromMarkdown,ef as temml};
